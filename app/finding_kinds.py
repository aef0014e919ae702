"""Kinds of findings of the nightly proof: what each one means, and the first step for a person.

`docs/findings/<kind>.md` has the details: causes, queries that show it, and when it is harmless.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of a finding, which is also the name of its rule."""

    OP_WITHOUT_HALF = "op_without_half"
    HALF_STUCK = "half_stuck"
    HALF_ALTERED = "half_altered"
    PUBLISHED_DIFFERS = "published_differs"
    TIMES_DISAGREE = "times_disagree"
    VERDICT_UNPROVEN = "verdict_unproven"
    COMMITTED_NOT_PUBLISHED = "committed_not_published"
    PUBLISHED_WITHOUT_COMMIT = "published_without_commit"
    PUBLISHED_AFTER_ROLLBACK = "published_after_rollback"
    OFFSET_OF_TWO_MESSAGES = "offset_of_two_messages"
    MESSAGE_WITH_TWO_OFFSETS = "message_with_two_offsets"
    OFFSETS_CONTRADICT_TIME = "offsets_contradict_time"
    UNROUTED = "unrouted"
    UNDELIVERED = "undelivered"
    DELIVERY_LATE = "delivery_late"
    RETRY_OVERDUE = "retry_overdue"
    RETRY_NEVER_DUE = "retry_never_due"
    REPLAY_INCOMPLETE = "replay_incomplete"
    CHECKPOINT_DIFFERS = "checkpoint_differs"
    SUBSCRIPTION_DIFFERS = "subscription_differs"
    RECEIPT_WITHOUT_MESSAGE = "receipt_without_message"
    RECEIPT_NOT_MATCHED = "receipt_not_matched"
    RECEIPT_WRONG = "receipt_wrong"
    DELIVERY_WRONG = "delivery_wrong"
    ORDER_BROKEN = "order_broken"
    CONTENT_DIFFERS = "content_differs"
    PARKED = "parked"
    CHECKS_BEYOND_MAX = "checks_beyond_max"
    VERDICT_REFUSED = "verdict_refused"
    AUDIT_BROKEN = "audit_broken"
    FEWER_THAN_USUAL = "fewer_than_usual"
    ARCHIVE_DIFFERS = "archive_differs"
    CERTIFICATE_DIFFERS = "certificate_differs"
    IN_TWO_INSTALLATIONS = "in_two_installations"
    LEDGER_DISAGREES = "ledger_disagrees"
    LEDGER_NOT_SENT = "ledger_not_sent"
    NEVER_CONSUMED = "never_consumed"
    ANSWER_DIFFERS = "answer_differs"
    CONSUMED_TWICE = "consumed_twice"
    CONSUMED_NOT_SENT = "consumed_not_sent"


class Meaning(NamedTuple):
    """What a kind means, and what to do first: one sentence each."""

    means: str
    begin: str


MEANINGS: dict[Kind, Meaning] = {
    Kind.OP_WITHOUT_HALF: Meaning(
        "A transaction has a verdict but no half message, or only part of it, or it has a second verdict.",
        "Find out what deleted rows of `half` or wrote to `op`; restore the half from the archive or a backup.",
    ),
    Kind.HALF_STUCK: Meaning(
        "A half message has no verdict although check-back should have decided or parked it by now.",
        "Verify that a worker runs its loops `sweep` and `checks` (`GET /readyz`), then ask or decide.",
    ),
    Kind.HALF_ALTERED: Meaning(
        "A half message is not what the producer posted: the digest of its stored content is another one.",
        "Find out what changed rows of `half`, and ask the producer for the right content.",
    ),
    Kind.PUBLISHED_DIFFERS: Meaning(
        "A message in the outbox has another topic, key, tag or due time than its half message.",
        "Compare both rows, and find out what changed one of them: subscribers got the one of the outbox.",
    ),
    Kind.TIMES_DISAGREE: Meaning(
        "A transaction was decided before it was born or published before it was decided, or a time is in the future.",
        "Check whether the database server's clock was set; otherwise find out what changed the rows.",
    ),
    Kind.VERDICT_UNPROVEN: Meaning(
        "A verdict lacks the evidence of its source: an answered check, a person's audit row, or enough answers.",
        "Ask the producer or the person for the outcome; then find out what wrote to `op`, `attempt` or `audit`.",
    ),
    Kind.COMMITTED_NOT_PUBLISHED: Meaning(
        "A transaction is committed, and some or all of its messages are not in the outbox: they are never delivered.",
        "Send the missing messages again with `POST /messages`; then find out what deletes rows of `outbox`.",
    ),
    Kind.PUBLISHED_WITHOUT_COMMIT: Meaning(
        "A message is in the outbox, and so goes to subscribers, although its transaction has no verdict or no half.",
        "Ask the producer for the outcome, and notify the subscribers if the message must not have gone out.",
    ),
    Kind.PUBLISHED_AFTER_ROLLBACK: Meaning(
        "A message of a rolled-back transaction is in the outbox, and so goes to subscribers.",
        "Notify the subscribers that received it; `GET /transactions/{id}` lists them.",
    ),
    Kind.OFFSET_OF_TWO_MESSAGES: Meaning(
        "Two messages have the same offset.",
        "Check whether the sequence `outbox_offset` was set back, and set it past the highest offset at once.",
    ),
    Kind.MESSAGE_WITH_TWO_OFFSETS: Meaning(
        "One message is in the outbox twice, with two offsets: subscribers may get it twice.",
        "Find out what wrote to `outbox`; subscribers that remember message ids were not harmed.",
    ),
    Kind.OFFSETS_CONTRADICT_TIME: Meaning(
        "A message has a higher offset than another and an earlier `committed_at`.",
        "Check whether the database server's clock was set back at that time.",
    ),
    Kind.UNROUTED: Meaning(
        "Messages of this topic were committed and no subscription takes them.",
        "`GET /topics`: if the topic is misspelled, fix its producer; if a subscription is missing, create it.",
    ),
    Kind.UNDELIVERED: Meaning(
        "A subscription matches this message; it has no receipt, does not wait, and is not a dead letter.",
        "`POST /subscriptions/{name}/replay` sends it again; then find out where it was lost.",
    ),
    Kind.DELIVERY_LATE: Meaning(
        "A subscription works, and messages that it takes have not been delivered within the SLA.",
        "Look at its lag and its receiver (`GET /subscriptions/{name}`), and that a worker runs (`GET /readyz`).",
    ),
    Kind.RETRY_OVERDUE: Meaning(
        "A subscription works, and retries of its deliveries were due longer ago than the SLA.",
        "Look at its breaker and its receiver (`GET /subscriptions/{name}`), and that a worker runs (`GET /readyz`).",
    ),
    Kind.RETRY_NEVER_DUE: Meaning(
        "A subscription has retries that are due later than its schedule permits: until then they are not sent.",
        "Look at `due_at` of its rows in `delivery_retry`, make them due, and find out what changed them.",
    ),
    Kind.REPLAY_INCOMPLETE: Meaning(
        "A replay is over, and messages that it must have sent again have no receipt of it and are not dead letters.",
        "`POST /subscriptions/{name}/replay` from the first of them; then find out where they were lost.",
    ),
    Kind.CHECKPOINT_DIFFERS: Meaning(
        "The checkpoint of a subscription is missing, lacks rows of shards, or is where no worker leaves it: beyond "
        "the log, or behind its receipts.",
        "Find out what changed `checkpoint`. Write missing rows again at an offset that is surely received.",
    ),
    Kind.SUBSCRIPTION_DIFFERS: Meaning(
        "A subscription is not as the last version in its history says, or a change of it is not in the audit.",
        "Compare `subscription`, `subscription_version` and `audit`, and find out what changed or deleted rows.",
    ),
    Kind.RECEIPT_WITHOUT_MESSAGE: Meaning(
        "A delivery is on record for a message that is not in the outbox.",
        "Find out what deleted rows of `outbox`; the subscriber has the message.",
    ),
    Kind.RECEIPT_NOT_MATCHED: Meaning(
        "A subscription got a message that its topics and filters do not match, or after it was deleted.",
        "Compare the subscription's topics and filters with the message; notify the subscriber's owner.",
    ),
    Kind.RECEIPT_WRONG: Meaning(
        "A receipt has an outcome, status, offset or time that no relay writes, or there is a dead letter too.",
        "Compare the receipt with the message's timeline, and find out what wrote or changed it.",
    ),
    Kind.DELIVERY_WRONG: Meaning(
        "A retry, dead letter or drop says what the service never writes, so it may hide a message that was lost.",
        "Compare it with the message's timeline, ask the receiver for the message, and find out what wrote the row.",
    ),
    Kind.ORDER_BROKEN: Meaning(
        "A subscription with `ordered: key` was sent a message of a key before the previous one was settled.",
        "Compare both receipts and the log of the worker; ask the subscriber which state it has stored for the key.",
    ),
    Kind.CONTENT_DIFFERS: Meaning(
        "The sent or archived content differs from what the producer posted: the digests do not match.",
        "Ask the subscriber for the received content and compare; then check the database's disks and memory.",
    ),
    Kind.PARKED: Meaning(
        "A transaction waits for a person: policy does not decide it.",
        "Decide it: `halfnote transactions verdict`.",
    ),
    Kind.CHECKS_BEYOND_MAX: Meaning(
        "A producer answered more checks than its policy's `max_checks`: policy should have decided earlier.",
        "Verify that a worker runs, and decide it if it is undecided: `halfnote transactions verdict`.",
    ),
    Kind.VERDICT_REFUSED: Meaning(
        "This producer group tried to end transactions against the verdict that stands.",
        "Find out why it ends twice, or after policy has decided: `immunity_s` may be shorter than its transactions.",
    ),
    Kind.AUDIT_BROKEN: Meaning(
        "The chain of the audit is broken: a row of a person's action was changed, removed or inserted.",
        "Compare the rows with a copy of the audit or a backup; find out who can write to `audit`.",
    ),
    Kind.FEWER_THAN_USUAL: Meaning(
        "A topic, producer group or subscription has far fewer messages than on the same weekday of the weeks before.",
        "Find out whether its producer still sends; if the drop is intended, set its share: `--usual-share-of`.",
    ),
    Kind.ARCHIVE_DIFFERS: Meaning(
        "The archive of the day differs from what was archived.",
        "Keep the day's partitions, find out what changed the files, and archive the day again.",
    ),
    Kind.CERTIFICATE_DIFFERS: Meaning(
        "Rows of a certified day were changed, removed or invented since the day's certificate was written.",
        "Compare these ids with the archive or a backup; find out who wrote to the day's tables.",
    ),
    Kind.IN_TWO_INSTALLATIONS: Meaning(
        "A transaction id occurs in two installations: a restored copy, or a half that was posted to both.",
        "Find out which installation is right, decide the other transaction, and notify subscribers of both.",
    ),
    Kind.LEDGER_DISAGREES: Meaning(
        "The producer's ledger has another verdict, time or reason than recorded here, or lacks a commit.",
        "Find out which is true. Send a commit recorded as a rollback with `halfnote transactions reissue`.",
    ),
    Kind.LEDGER_NOT_SENT: Meaning(
        "The producer's ledger has a commit of this transaction, and it was not committed here.",
        "Check that the producer posts the half before it commits; send the message with `POST /messages`.",
    ),
    Kind.NEVER_CONSUMED: Meaning(
        "A message has a receipt and is not in the consumer's ledger.",
        "Find out whether the consumer answered 2xx before it stored the message. A replay sends it again.",
    ),
    Kind.ANSWER_DIFFERS: Meaning(
        "A receipt has another HTTP status than the consumer's ledger says it answered.",
        "Compare the receipt with the consumer's own log, and find out what changed one of them.",
    ),
    Kind.CONSUMED_TWICE: Meaning(
        "The consumer's ledger has this message more than once.",
        "Make the consumer remember message ids: delivery is at least once.",
    ),
    Kind.CONSUMED_NOT_SENT: Meaning(
        "The consumer's ledger has a message that is not in the outbox, or never went to the subscription it names.",
        "Find out where the consumer got it, and whether the ledger belongs to the same Halfnote.",
    ),
}


def docs_of(kind: str) -> str:
    """Return the path of the service that explains a kind."""
    return f"/findings/kinds/{kind}"
