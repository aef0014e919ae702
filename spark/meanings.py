"""What each kind of finding means, and where a person begins: the words of the service, for the report.

The service has the same in app/finding_kinds.py, which nothing here may import; a test holds that the two agree. The
order is that of the report.
"""

MEANINGS: dict[str, tuple[str, str]] = {
    "op_without_half": (
        "A verdict is on record for a transaction that has no half message, or not all of it; or a second verdict is.",
        "Find out who deleted rows of `half`, or wrote to `op` by hand; restore the half from the archive or a backup.",
    ),
    "half_stuck": (
        "A half message has no verdict although check-back should have decided or parked it by now.",
        "See that a worker runs and its loops `sweep` and `checks` turn (`GET /readyz`), then ask or decide.",
    ),
    "committed_not_published": (
        "A transaction is committed, and some or all of its messages are not in the outbox: nobody gets them.",
        "Send the missing messages again by `POST /messages`; then look for who deletes rows of `outbox`.",
    ),
    "published_without_commit": (
        "A message is in the outbox, and so goes to subscribers, although its transaction has no verdict or no half.",
        "Ask the producer what became of it, and tell the subscribers if it must not have gone out.",
    ),
    "published_after_rollback": (
        "A message of a rolled-back transaction is in the outbox, and so goes to subscribers.",
        "Tell the subscribers that received it; `GET /transactions/{id}` lists them.",
    ),
    "offset_of_two_messages": (
        "Two messages have the same offset.",
        "See whether the sequence `outbox_offset` was set back, and set it past the highest offset at once.",
    ),
    "message_with_two_offsets": (
        "One message is in the outbox twice, with two offsets: subscribers may get it twice.",
        "See who wrote to `outbox`; subscribers that remember message ids were not harmed.",
    ),
    "offsets_contradict_time": (
        "A message has a higher offset than another and an earlier `committed_at`.",
        "See whether the database server's clock was set back at that time.",
    ),
    "unrouted": (
        "Messages of this topic were committed and no subscription takes them.",
        "`GET /topics`: if the topic is misspelt, mend its producer; if a subscription is missing, make it.",
    ),
    "undelivered": (
        "A subscription should have got this message; it has no receipt, does not wait, and is no dead letter.",
        "`POST /subscriptions/{name}/replay` sends it again; then find out where it was lost.",
    ),
    "receipt_without_message": (
        "A delivery is on record of a message that is not in the outbox.",
        "See who deleted rows of `outbox`; the subscriber has the message.",
    ),
    "receipt_not_matched": (
        "A subscription got a message that its topics and filters do not match, or after it was deleted.",
        "Compare the subscription's topics and filters with the message; tell whoever owns the subscriber.",
    ),
    "content_differs": (
        "What was sent, or archived, is not what the producer posted: the digests of the content differ.",
        "Ask the subscriber for what it got and compare; then check the database's disks and memory.",
    ),
    "parked": (
        "A transaction waits for a person: policy does not decide it.",
        "Decide it: `halfnote transactions verdict`.",
    ),
    "checks_beyond_max": (
        "A producer answered more checks than its policy's `max_checks`: policy should have ended it before.",
        "See that a worker runs, and decide it if nobody has: `halfnote transactions verdict`.",
    ),
    "verdict_refused": (
        "This producer group tried to end transactions against the verdict that stands.",
        "See why it ends twice, or after policy has decided: `immunity_s` may be shorter than its transactions.",
    ),
    "archive_differs": (
        "The archive of the day does not hold what was archived.",
        "Keep the day's partitions, see what changed the files, and archive the day again.",
    ),
    "ledger_disagrees": (
        "The producer's own ledger says one verdict, or lacks a commit, and the one recorded here is another.",
        "Find out which is true. A rolled-back one that was committed goes out by `halfnote transactions reissue`.",
    ),
    "ledger_not_sent": (
        "The producer's ledger says that it committed this transaction, and nothing of it was committed here.",
        "See whether the producer posts the half before it commits; send the message by `POST /messages`.",
    ),
    "never_consumed": (
        "A message was received, as its receipt says, and is not in the consumer's ledger.",
        "See what the consumer did with it: it answered 2xx before it had stored it. A replay sends it again.",
    ),
    "consumed_twice": (
        "The consumer's ledger has this message more than once.",
        "Have the consumer remember message ids: delivery is at least once.",
    ),
    "consumed_not_sent": (
        "The consumer's ledger has a message that is not in the outbox, or never went to the subscription it names.",
        "See where the consumer got it from, and whether the ledger is of the same Halfnote.",
    ),
}
