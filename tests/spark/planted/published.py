"""Faults of rows of `outbox`: each column, and rows that are gone, invented or moved."""

from tests.spark.planted.fault import Fault

_AT = "where transaction_id = %(id)s and position = 0"
OUT = "published_differs"
NEXT = "offsets_contradict_time"


def _set(name: str, change: str, *finds: str, of: str = "sale") -> Fault:
    return Fault(f"outbox: {name}", of, f"update outbox set {change} {_AT}", finds)


FAULTS = [
    _set("topic", "topic = 'plain'", OUT, "receipt_not_matched", "undelivered={id}-0:{plains}"),
    _set("topic that nobody takes", "topic = 'nobody'", OUT, "receipt_not_matched"),
    _set("key", "key = 'another'", OUT),
    _set("key is gone", "key = null", OUT),
    _set("tag", "tag = 'old'", OUT),
    _set("tag of a plain message", "tag = 'old'", OUT, of="plain"),
    _set("due in an hour", "due_at = committed_at + interval '1 hour'", OUT, "receipt_wrong"),
    _set("due in 2099", "due_at = '2099-01-01'", OUT, "receipt_wrong", of="plain"),
    _set("due a microsecond later", "due_at = committed_at + interval '1 us'", OUT, of="plain"),
    Fault(
        "outbox: delay is gone",
        "sale",
        "update outbox set due_at = null where transaction_id = %(id)s and position = 1",
        (f"{OUT}={{id}}-1",),
    ),
    _set(
        "committed two days earlier",
        "committed_at = committed_at - interval '2 days'",
        "times_disagree",
        NEXT,
        OUT + "={id}-1",
    ),
    _set("committed an hour earlier, all", "committed_at = committed_at - interval '1 hour'", NEXT, of="plain"),
    _set(
        "committed in 2099",
        "committed_at = '2099-01-01'",
        "times_disagree",
        "receipt_wrong",
        f"{NEXT}={{after}}",
        of="plain",
    ),
    _set("offset 1000 higher", '"offset" = "offset" + 100000', "receipt_wrong", f"{NEXT}={{high}}", of="plain"),
    _set("offset below all", '"offset" = -5', "receipt_wrong", "receipt_not_matched", f"{NEXT}=1", of="plain"),
    _set("offset of the one before", '"offset" = "offset" - 1', "receipt_wrong", of="plain"),
    _set(
        "offset of the next one of its transaction",
        '"offset" = "offset" + 1',
        "receipt_wrong",
        "offset_of_two_messages={next}",
    ),
    Fault(
        "outbox: the row is gone",
        "plain",
        f"delete from outbox {_AT}",
        ("committed_not_published", "receipt_without_message"),
        ("consumed_not_sent",),
    ),
    Fault(
        "outbox: the row and its receipts are gone",
        "plain",
        f"with one as (delete from receipt {_AT}) delete from outbox {_AT}",
        ("committed_not_published",),
        ("consumed_not_sent",),
    ),
    Fault(
        "outbox: one of two messages is gone",
        "sale",
        f"delete from outbox {_AT}",
        ("committed_not_published", "receipt_without_message"),
        ("consumed_not_sent",),
    ),
    Fault(
        "outbox: a second offset",
        "plain",
        'insert into outbox select transaction_id, position, (select max("offset") + 10 from outbox), topic, key, tag, '
        f"due_at, clock_timestamp() from outbox {_AT}",
        ("message_with_two_offsets",),
    ),
    Fault(
        "outbox: a message of a rolled-back one",
        "back",
        'insert into outbox (transaction_id, position, "offset", topic, key, tag, committed_at) select transaction_id, '
        'position, (select max("offset") + 11 from outbox), topic, key, tag, clock_timestamp() from half '
        f"{_AT}",
        ("published_after_rollback", "delivery_late=sales"),
    ),
    Fault(
        "outbox: a message that has no half",
        "plain",
        'insert into outbox select transaction_id, 3, (select max("offset") + 12 from outbox), topic, key, tag, '
        f"due_at, clock_timestamp() from outbox {_AT}",
        ("published_without_commit={id}-3", "delivery_late=plains"),
    ),
    Fault(
        "outbox: a row moved to another transaction",
        "plain",
        f"update outbox set transaction_id = overlay(transaction_id::text placing 'ffff' from 15 for 4)::uuid {_AT}",
        (
            "committed_not_published",
            "receipt_without_message",
            "published_without_commit={moved}-0",
            "undelivered={moved}-0:{subscription}",
        ),
        ("consumed_not_sent",),
    ),
    Fault(
        "outbox: a row moved to another position",
        "plain",
        f"update outbox set position = 4 {_AT}",
        (
            "committed_not_published",
            "receipt_without_message",
            "published_without_commit={id}-4",
            "undelivered={id}-4:{subscription}",
        ),
        ("consumed_not_sent",),
    ),
    Fault(
        "outbox: the commits of two messages of one transaction differ",
        "sale",
        "update outbox set committed_at = committed_at + interval '1 us', due_at = due_at + interval '1 us' "
        "where transaction_id = %(id)s and position = 1",
        ("published_differs={id}-1",),
    ),
]
