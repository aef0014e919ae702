"""The meaning of each kind of finding, and the first step for a person: the same texts as in the service.

The service has them in app/finding_kinds.py, which this package must not import; a test verifies that both agree. The
order is the order of the report. NAMES has what the report calls kinds whose own name is not clear to a person.
"""

MEANINGS: dict[str, tuple[str, str]] = {
    "op_without_half": (
        "A transaction has a verdict but no half message, or only part of it, or it has a second verdict.",
        "Find out what deleted rows of `half` or wrote to `op`; restore the half from the archive or a backup.",
    ),
    "half_stuck": (
        "A half message has no verdict although check-back should have decided or parked it by now.",
        "Verify that a worker runs its loops `sweep` and `checks` (`GET /readyz`), then ask or decide.",
    ),
    "half_altered": (
        "A half message is not what the producer posted: the digest of its stored content is another one.",
        "Find out what changed rows of `half`, and ask the producer for the right content.",
    ),
    "published_differs": (
        "A message in the outbox has another topic, key, tag or due time than its half message.",
        "Compare both rows, and find out what changed one of them: subscribers got the one of the outbox.",
    ),
    "times_disagree": (
        "A transaction was decided before it was born or published before it was decided, or a time is in the future.",
        "Check whether the database server's clock was set; otherwise find out what changed the rows.",
    ),
    "verdict_unproven": (
        "A verdict lacks the evidence of its source: an answered check, a person's audit row, or enough answers.",
        "Ask the producer or the person for the outcome; then find out what wrote to `op`, `attempt` or `audit`.",
    ),
    "committed_not_published": (
        "A transaction is committed, and some or all of its messages are not in the outbox: they are never delivered.",
        "Send the missing messages again with `POST /messages`; then find out what deletes rows of `outbox`.",
    ),
    "published_without_commit": (
        "A message is in the outbox, and so goes to subscribers, although its transaction has no verdict or no half.",
        "Ask the producer for the outcome, and notify the subscribers if the message must not have gone out.",
    ),
    "published_after_rollback": (
        "A message of a rolled-back transaction is in the outbox, and so goes to subscribers.",
        "Notify the subscribers that received it; `GET /transactions/{id}` lists them.",
    ),
    "offset_of_two_messages": (
        "Two messages have the same offset.",
        "Check whether the sequence `outbox_offset` was set back, and set it past the highest offset at once.",
    ),
    "message_with_two_offsets": (
        "One message is in the outbox twice, with two offsets: subscribers may get it twice.",
        "Find out what wrote to `outbox`; subscribers that remember message ids were not harmed.",
    ),
    "offsets_contradict_time": (
        "A message has a higher offset than another and an earlier `committed_at`.",
        "Check whether the database server's clock was set back at that time.",
    ),
    "unrouted": (
        "Messages of this topic were committed and no subscription takes them.",
        "`GET /topics`: if the topic is misspelled, fix its producer; if a subscription is missing, create it.",
    ),
    "undelivered": (
        "A subscription matches this message; it has no receipt, does not wait, and is not a dead letter.",
        "`POST /subscriptions/{name}/replay` sends it again; then find out where it was lost.",
    ),
    "delivery_late": (
        "A subscription works, and messages that it takes have not been delivered within the SLA.",
        "Look at its lag and its receiver (`GET /subscriptions/{name}`), and that a worker runs (`GET /readyz`).",
    ),
    "retry_overdue": (
        "A subscription works, and retries of its deliveries were due longer ago than the SLA.",
        "Look at its breaker and its receiver (`GET /subscriptions/{name}`), and that a worker runs (`GET /readyz`).",
    ),
    "retry_never_due": (
        "A subscription has retries that are due later than its schedule permits: until then they are not sent.",
        "Look at `due_at` of its rows in `delivery_retry`, make them due, and find out what changed them.",
    ),
    "replay_incomplete": (
        "A replay is over, and messages that it must have sent again have no receipt of it and are not dead letters.",
        "`POST /subscriptions/{name}/replay` from the first of them; then find out where they were lost.",
    ),
    "checkpoint_differs": (
        "The checkpoint of a subscription is missing, lacks rows of shards, or is where no worker leaves it: beyond "
        "the log, or behind its receipts.",
        "Find out what changed `checkpoint`. Write missing rows again at an offset that is surely received.",
    ),
    "subscription_differs": (
        "A subscription is not as the last version in its history says, or a change of it is not in the audit.",
        "Compare `subscription`, `subscription_version` and `audit`, and find out what changed or deleted rows.",
    ),
    "receipt_without_message": (
        "A delivery is on record for a message that is not in the outbox.",
        "Find out what deleted rows of `outbox`; the subscriber has the message.",
    ),
    "receipt_not_matched": (
        "A subscription got a message that its topics and filters do not match, or after it was deleted.",
        "Compare the subscription's topics and filters with the message; notify the subscriber's owner.",
    ),
    "receipt_wrong": (
        "A receipt has an outcome, status, offset or time that no relay writes, or there is a dead letter too.",
        "Compare the receipt with the message's timeline, and find out what wrote or changed it.",
    ),
    "delivery_wrong": (
        "A retry, dead letter or drop says what the service never writes, so it may hide a message that was lost.",
        "Compare it with the message's timeline, ask the receiver for the message, and find out what wrote the row.",
    ),
    "order_broken": (
        "A subscription with `ordered: key` was sent a message of a key before the previous one was settled.",
        "Compare both receipts and the log of the worker; ask the subscriber which state it has stored for the key.",
    ),
    "content_differs": (
        "The sent or archived content differs from what the producer posted: the digests do not match.",
        "Ask the subscriber for the received content and compare; then check the database's disks and memory.",
    ),
    "parked": (
        "A transaction waits for a person: policy does not decide it.",
        "Decide it: `halfnote transactions verdict`.",
    ),
    "checks_beyond_max": (
        "A producer answered more checks than its policy's `max_checks`: policy should have decided earlier.",
        "Verify that a worker runs, and decide it if it is undecided: `halfnote transactions verdict`.",
    ),
    "verdict_refused": (
        "This producer group tried to end transactions against the verdict that stands.",
        "Find out why it ends twice, or after policy has decided: `immunity_s` may be shorter than its transactions.",
    ),
    "audit_broken": (
        "The chain of the audit is broken: a row of a person's action was changed, removed or inserted.",
        "Compare the rows with a copy of the audit or a backup; find out who can write to `audit`.",
    ),
    "fewer_than_usual": (
        "A topic, producer group or subscription has far fewer messages than on the same weekday of the weeks before.",
        "Find out whether its producer still sends; if the drop is intended, set its share: `--usual-share-of`.",
    ),
    "archive_differs": (
        "The archive of the day differs from what was archived.",
        "Keep the day's partitions, find out what changed the files, and archive the day again.",
    ),
    "certificate_differs": (
        "Rows of a certified day were changed, removed or invented since the day's certificate was written.",
        "Compare these ids with the archive or a backup; find out who wrote to the day's tables.",
    ),
    "in_two_installations": (
        "A transaction id occurs in two installations: a restored copy, or a half that was posted to both.",
        "Find out which installation is right, decide the other transaction, and notify subscribers of both.",
    ),
    "ledger_disagrees": (
        "The producer's ledger has another verdict, time or reason than recorded here, or lacks a commit.",
        "Find out which is true. Send a commit recorded as a rollback with `halfnote transactions reissue`.",
    ),
    "ledger_not_sent": (
        "The producer's ledger has a commit of this transaction, and it was not committed here.",
        "Check that the producer posts the half before it commits; send the message with `POST /messages`.",
    ),
    "never_consumed": (
        "A message has a receipt and is not in the consumer's ledger.",
        "Find out whether the consumer answered 2xx before it stored the message. A replay sends it again.",
    ),
    "answer_differs": (
        "A receipt has another HTTP status than the consumer's ledger says it answered.",
        "Compare the receipt with the consumer's own log, and find out what changed one of them.",
    ),
    "consumed_twice": (
        "The consumer's ledger has this message more than once.",
        "Make the consumer remember message ids: delivery is at least once.",
    ),
    "consumed_not_sent": (
        "The consumer's ledger has a message that is not in the outbox, or never went to the subscription it names.",
        "Find out where the consumer got it, and whether the ledger belongs to the same Halfnote.",
    ),
}

NAMES: dict[str, str] = {
    "op_without_half": "verdict without a half message",
    "half_stuck": "no verdict in time",
    "half_altered": "half message changed",
    "published_differs": "published message differs from its half message",
    "verdict_unproven": "verdict without evidence",
    "committed_not_published": "committed, not published",
    "published_without_commit": "published without a commit",
    "published_after_rollback": "published after a rollback",
    "offset_of_two_messages": "one offset, two messages",
    "message_with_two_offsets": "one message, two offsets",
    "offsets_contradict_time": "offsets and times disagree",
    "order_broken": "sent out of the order of the key",
    "unrouted": "no subscription takes it",
    "undelivered": "not delivered",
    "delivery_late": "not delivered within the SLA",
    "retry_never_due": "next try planned too late",
    "replay_incomplete": "replay without its receipts",
    "checkpoint_differs": "checkpoint missing or impossible",
    "subscription_differs": "subscription differs from its history",
    "receipt_without_message": "receipt without a message",
    "receipt_not_matched": "received, does not match",
    "receipt_wrong": "wrong receipt",
    "delivery_wrong": "wrong retry, dead letter or drop",
    "parked": "waits for a person",
    "checks_beyond_max": "more checks than the policy allows",
    "audit_broken": "audit changed",
    "fewer_than_usual": "fewer messages than usual",
    "in_two_installations": "one transaction, two installations",
    "ledger_disagrees": "producer's ledger disagrees",
    "ledger_not_sent": "in the producer's ledger, not committed",
    "never_consumed": "delivered, not consumed",
    "answer_differs": "receipt has another answer than the consumer gave",
    "consumed_not_sent": "consumed, not sent",
}


def name_of_kind(kind: str) -> str:
    """Return what the report calls a kind of finding."""
    return NAMES.get(kind, kind.replace("_", " "))
