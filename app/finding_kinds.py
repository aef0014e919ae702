"""The kinds of findings of the nightly proof: what each one means, and where a person begins.

`docs/findings/<kind>.md` has the whole of it: how it can come about, which queries show it, when it is harmless.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a rule of the proof found; the names of the rules."""

    OP_WITHOUT_HALF = "op_without_half"
    HALF_STUCK = "half_stuck"
    COMMITTED_NOT_PUBLISHED = "committed_not_published"
    PUBLISHED_WITHOUT_COMMIT = "published_without_commit"
    PUBLISHED_AFTER_ROLLBACK = "published_after_rollback"
    OFFSET_OF_TWO_MESSAGES = "offset_of_two_messages"
    MESSAGE_WITH_TWO_OFFSETS = "message_with_two_offsets"
    OFFSETS_CONTRADICT_TIME = "offsets_contradict_time"
    UNROUTED = "unrouted"
    UNDELIVERED = "undelivered"
    RECEIPT_WITHOUT_MESSAGE = "receipt_without_message"
    RECEIPT_NOT_MATCHED = "receipt_not_matched"
    CONTENT_DIFFERS = "content_differs"
    PARKED = "parked"
    CHECKS_BEYOND_MAX = "checks_beyond_max"
    VERDICT_REFUSED = "verdict_refused"
    ARCHIVE_DIFFERS = "archive_differs"
    LEDGER_DISAGREES = "ledger_disagrees"
    LEDGER_NOT_SENT = "ledger_not_sent"
    NEVER_CONSUMED = "never_consumed"
    CONSUMED_TWICE = "consumed_twice"
    CONSUMED_NOT_SENT = "consumed_not_sent"


class Meaning(NamedTuple):
    """One sentence about a kind, and one about what to do first."""

    means: str
    begin: str


MEANINGS: dict[Kind, Meaning] = {
    Kind.OP_WITHOUT_HALF: Meaning(
        "A verdict is on record for a transaction that has no half message, or not all of it; or a second verdict is.",
        "Find out who deleted rows of `half`, or wrote to `op` by hand; restore the half from the archive or a backup.",
    ),
    Kind.HALF_STUCK: Meaning(
        "A half message has no verdict although check-back should have decided or parked it by now.",
        "See that a worker runs and its loops `sweep` and `checks` turn (`GET /readyz`), then ask or decide.",
    ),
    Kind.COMMITTED_NOT_PUBLISHED: Meaning(
        "A transaction is committed, and some or all of its messages are not in the outbox: nobody gets them.",
        "Send the missing messages again by `POST /messages`; then look for who deletes rows of `outbox`.",
    ),
    Kind.PUBLISHED_WITHOUT_COMMIT: Meaning(
        "A message is in the outbox, and so goes to subscribers, although its transaction has no verdict or no half.",
        "Ask the producer what became of it, and tell the subscribers if it must not have gone out.",
    ),
    Kind.PUBLISHED_AFTER_ROLLBACK: Meaning(
        "A message of a rolled-back transaction is in the outbox, and so goes to subscribers.",
        "Tell the subscribers that received it; `GET /transactions/{id}` lists them.",
    ),
    Kind.OFFSET_OF_TWO_MESSAGES: Meaning(
        "Two messages have the same offset.",
        "See whether the sequence `outbox_offset` was set back, and set it past the highest offset at once.",
    ),
    Kind.MESSAGE_WITH_TWO_OFFSETS: Meaning(
        "One message is in the outbox twice, with two offsets: subscribers may get it twice.",
        "See who wrote to `outbox`; subscribers that remember message ids were not harmed.",
    ),
    Kind.OFFSETS_CONTRADICT_TIME: Meaning(
        "A message has a higher offset than another and an earlier `committed_at`.",
        "See whether the database server's clock was set back at that time.",
    ),
    Kind.UNROUTED: Meaning(
        "Messages of this topic were committed and no subscription takes them.",
        "`GET /topics`: if the topic is misspelt, mend its producer; if a subscription is missing, make it.",
    ),
    Kind.UNDELIVERED: Meaning(
        "A subscription should have got this message; it has no receipt, does not wait, and is no dead letter.",
        "`POST /subscriptions/{name}/replay` sends it again; then find out where it was lost.",
    ),
    Kind.RECEIPT_WITHOUT_MESSAGE: Meaning(
        "A delivery is on record of a message that is not in the outbox.",
        "See who deleted rows of `outbox`; the subscriber has the message.",
    ),
    Kind.RECEIPT_NOT_MATCHED: Meaning(
        "A subscription got a message that its topics and filters do not match, or after it was deleted.",
        "Compare the subscription's topics and filters with the message; tell whoever owns the subscriber.",
    ),
    Kind.CONTENT_DIFFERS: Meaning(
        "What was sent, or archived, is not what the producer posted: the digests of the content differ.",
        "Ask the subscriber for what it got and compare; then check the database's disks and memory.",
    ),
    Kind.PARKED: Meaning(
        "A transaction waits for a person: policy does not decide it.",
        "Decide it: `halfnote transactions verdict`.",
    ),
    Kind.CHECKS_BEYOND_MAX: Meaning(
        "A producer answered more checks than its policy's `max_checks`: policy should have ended it before.",
        "See that a worker runs, and decide it if nobody has: `halfnote transactions verdict`.",
    ),
    Kind.VERDICT_REFUSED: Meaning(
        "This producer group tried to end transactions against the verdict that stands.",
        "See why it ends twice, or after policy has decided: `immunity_s` may be shorter than its transactions.",
    ),
    Kind.ARCHIVE_DIFFERS: Meaning(
        "The archive of the day does not hold what was archived.",
        "Keep the day's partitions, see what changed the files, and archive the day again.",
    ),
    Kind.LEDGER_DISAGREES: Meaning(
        "The producer's own ledger says one verdict, or lacks a commit, and the one recorded here is another.",
        "Find out which is true. A rolled-back one that was committed goes out by `halfnote transactions reissue`.",
    ),
    Kind.LEDGER_NOT_SENT: Meaning(
        "The producer's ledger says that it committed this transaction, and nothing of it was committed here.",
        "See whether the producer posts the half before it commits; send the message by `POST /messages`.",
    ),
    Kind.NEVER_CONSUMED: Meaning(
        "A message was received, as its receipt says, and is not in the consumer's ledger.",
        "See what the consumer did with it: it answered 2xx before it had stored it. A replay sends it again.",
    ),
    Kind.CONSUMED_TWICE: Meaning(
        "The consumer's ledger has this message more than once.",
        "Have the consumer remember message ids: delivery is at least once.",
    ),
    Kind.CONSUMED_NOT_SENT: Meaning(
        "The consumer's ledger has a message that is not in the outbox, or never went to the subscription it names.",
        "See where the consumer got it from, and whether the ledger is of the same Halfnote.",
    ),
}


def docs_of(kind: str) -> str:
    """Return the path of the service that explains a kind."""
    return f"/findings/kinds/{kind}"
