"""Faults of retries, dead letters, redeliveries, replays, and the attempts of deliveries."""

from tests.spark.planted.fault import Fault

_AT = "where transaction_id = %(id)s and position = 0 and subscription_id = %(subscription)s and replay = 0"
_COLUMNS = 'subscription_id, transaction_id, position, "offset", topic, attempts, first_at'
_INVENTED = f"(delete from receipt {_AT} returning *) insert into"
WRONG = "delivery_wrong"


def _set(name: str, table: str, of: str, change: str, *finds: str) -> Fault:
    return Fault(f"{table}: {name}", of, f"update {table} set {change} {_AT}", finds or (WRONG,))


def _gone(table: str, of: str, *finds: str) -> Fault:
    return Fault(f"{table}: gone", of, f"delete from {table} {_AT}", finds)


def _instead(name: str, table: str, values: str, *finds: str, columns: str = "") -> Fault:
    """Return a fault that deletes a receipt and invents another row in its place."""
    sql = (
        f"with gone as (delete from receipt {_AT} returning *) insert into {table} ({_COLUMNS}{columns}) "
        f"select subscription_id, transaction_id, position, \"offset\", 'plain', {values} from gone"
    )
    return Fault(f"{table}: {name}", "plain", sql, finds or (WRONG,))


_ACTED = (
    "with gone as (delete from receipt {at} returning *) insert into redelivery (subscription_id, replay, "
    'transaction_id, position, "offset", what, at, died_at, died_because, attempts) select subscription_id, 0, '
    "transaction_id, position, \"offset\", '{what}', now(), now(), 'retries_exhausted', 1 from gone"
)

FAULTS = [
    _gone("delivery_retry", "failing", "undelivered"),
    Fault("delivery_retry: gone, of a delayed message", "later", f"delete from delivery_retry {_AT}", ("undelivered",)),
    _set("of a delayed message due too early", "delivery_retry", "later", "due_at = now() + interval '1 minute'"),
    _set("of a delayed message due now", "delivery_retry", "later", "due_at = now()", WRONG, "retry_overdue"),
    _set(
        "of a delayed message due an hour late",
        "delivery_retry",
        "later",
        "due_at = due_at + interval '1 hour'",
        WRONG,
        "retry_never_due",
    ),
    _set("offset", "delivery_retry", "failing", '"offset" = "offset" + 1'),
    _set("offset of a delayed message", "delivery_retry", "later", '"offset" = "offset" + 1'),
    _set("topic", "delivery_retry", "failing", "topic = 'other'"),
    _set("key", "delivery_retry", "failing", "key = 'other'"),
    _set("tries forgotten", "delivery_retry", "failing", "attempts = 0"),
    _set("more tries than there were", "delivery_retry", "failing", "attempts = 40"),
    _set("fewer than no tries", "delivery_retry", "later", "attempts = -1"),
    _set("first tried in 2099", "delivery_retry", "failing", "first_at = '2099-01-01'"),
    _set("position", "delivery_retry", "later", "position = 7", "delivery_wrong={id}-7:{subscription}", "undelivered"),
    _set(
        "subscription",
        "delivery_retry",
        "failing",
        "subscription_id = 9999",
        "undelivered",
        "delivery_wrong={id}-0:9999",
    ),
    _set("replay that never was", "delivery_retry", "failing", "replay = 7777", "undelivered", WRONG),
    _instead("in place of a receipt", "delivery_retry", "1, first_at, now() + interval '1 minute'", columns=", due_at"),
    _instead(
        "without a try in place of a receipt",
        "delivery_retry",
        "0, null, now() + interval '1 minute'",
        WRONG,
        "retry_never_due",
        columns=", due_at",
    ),
    Fault(
        "delivery_retry: of a message that is nowhere",
        "plain",
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, due_at) '
        "values (%(subscription)s, overlay(%(id)s placing 'ffff' from 15 for 4)::uuid, 0, 1, 'plain', 0, "
        "now() + interval '1 minute')",
        ("delivery_wrong={moved}-0:{subscription}",),
    ),
    _gone("dead_letter", "dead", "undelivered"),
    _set("offset", "dead_letter", "dead", '"offset" = "offset" + 1'),
    _set("topic", "dead_letter", "dead", "topic = 'other'"),
    _set("no try", "dead_letter", "dead", "attempts = 0"),
    _set("more tries than there were", "dead_letter", "dead", "attempts = 9"),
    _set("fewer than no tries", "dead_letter", "dead", "attempts = -1"),
    _set("died in 2099", "dead_letter", "dead", "died_at = '2099-01-01'"),
    _set("died before its first try", "dead_letter", "dead", "died_at = died_at - interval '1 day'"),
    _set("position", "dead_letter", "dead", "position = 7", "undelivered", "delivery_wrong={id}-7:{subscription}"),
    _set("subscription", "dead_letter", "dead", "subscription_id = 9999", "undelivered", "delivery_wrong={id}-0:9999"),
    _set("replay that never was", "dead_letter", "dead", "replay = 7777", "undelivered", WRONG),
    Fault(
        "dead_letter: beside a receipt",
        "plain",
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "reason, died_at) select subscription_id, transaction_id, position, \"offset\", 'plain', 1, first_at, "
        f"'retries_exhausted', settled_at from receipt {_AT}",
        ("receipt_wrong", WRONG),
    ),
    _instead(
        "in place of a receipt",
        "dead_letter",
        "1, first_at, 'retries_exhausted', settled_at",
        columns=", reason, died_at",
    ),
    _instead(
        "as of a removed day, in place of a receipt",
        "dead_letter",
        "0, null, 'day_left', settled_at",
        columns=", reason, died_at",
    ),
    _instead(
        "as expired, in place of a receipt",
        "dead_letter",
        "0, null, 'expired', settled_at",
        columns=", reason, died_at",
    ),
    Fault("redelivery: gone, of a dropped dead letter", "dropped", f"delete from redelivery {_AT}", ("receipt_wrong",)),
    Fault(
        "redelivery: of another subscription",
        "dropped",
        f"update redelivery set subscription_id = 9999 {_AT}",
        ("receipt_wrong", "delivery_wrong={id}-0:9999"),
    ),
    Fault(
        "redelivery: dropped becomes redelivered",
        "dropped",
        f"update redelivery set what = 'redelivered' {_AT}",
        ("receipt_wrong",),
    ),
    Fault("redelivery: a drop in place of a receipt", "plain", _ACTED.format(at=_AT, what="dropped"), (WRONG,)),
    Fault(
        "redelivery: one in place of a receipt", "plain", _ACTED.format(at=_AT, what="redelivered"), ("undelivered",)
    ),
    Fault(
        "attempt: a failed delivery is gone",
        "tried",
        f"delete from attempt {_AT.replace('and replay = 0', '')}",
        ("receipt_wrong",),
    ),
    Fault(
        "attempt: a failed delivery of a retry is gone",
        "failing",
        f"delete from attempt {_AT.replace('and replay = 0', '')}",
        (WRONG,),
    ),
    Fault(
        "attempt: a failed delivery of a dead letter is gone",
        "dead",
        f"delete from attempt {_AT.replace('and replay = 0', '')}",
        (WRONG,),
    ),
    Fault(
        "attempt: a failed delivery was only postponed",
        "tried",
        f"update attempt set outcome = 'postponed' {_AT.replace('and replay = 0', '')}",
        ("receipt_wrong",),
    ),
    Fault(
        "attempt: a failed delivery of another subscription",
        "tried",
        f"update attempt set subscription_id = 9999 {_AT.replace('and replay = 0', '')}",
        ("receipt_wrong",),
    ),
    Fault(
        "attempt: a failed delivery is invented",
        "plain",
        "insert into attempt (transaction_id, kind, at, number, outcome, position, subscription_id) values "
        "(%(id)s, 'delivery', now(), 1, 'failed', 0, %(subscription)s)",
        ("receipt_wrong",),
    ),
]
