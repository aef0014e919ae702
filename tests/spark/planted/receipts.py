"""Faults of rows of `receipt`: each column, and rows that are gone, invented or moved."""

from tests.spark.planted.fault import Fault

_AT = "where transaction_id = %(id)s and position = 0 and subscription_id = %(subscription)s and replay = 0"
_REPLAYED = _AT.replace("replay = 0", "replay <> 0")
WRONG = "receipt_wrong"
ANSWER = ("answer_differs",)


def _set(
    name: str, change: str, *finds: str, of: str = "plain", rows: str = _AT, ledgers: tuple[str, ...] = ()
) -> Fault:
    return Fault(f"receipt: {name}", of, f"update receipt set {change} {rows}", finds or (WRONG,), ledgers)


def _copy(name: str, change: str, *finds: str, of: str = "plain", rows: str = _AT) -> Fault:
    columns = (
        "r.transaction_id r.position r.subscription_id offset outcome attempts first_at duration_ms status digest "
    )
    columns = columns.replace("r.", "") + "settled_at replay"
    names = [f'"{one}"' for one in columns.split()]
    changed, _, value = change.partition(" = ")
    values = [value if one == f'"{changed}"' else one for one in names]
    sql = f"insert into receipt ({', '.join(names)}) select {', '.join(values)} from receipt {rows}"
    return Fault(f"receipt: {name}", of, sql, finds)


FAULTS = [
    _set(
        "transaction",
        "transaction_id = overlay(transaction_id::text placing 'ffff' from 15 for 4)::uuid",
        "undelivered",
        "receipt_without_message={moved}-0:{subscription}",
    ),
    _set("position", "position = 7", "undelivered", "receipt_without_message={id}-7:{subscription}"),
    _set(
        "subscription",
        "subscription_id = (select subscription_id from subscription where name = 'sales')",
        "undelivered",
        "receipt_not_matched={id}-0:{sales}",
    ),
    _set("subscription that never was", "subscription_id = 9999", "undelivered", "receipt_not_matched={id}-0:9999"),
    _set("offset", '"offset" = "offset" + 1'),
    _set("offset 0", '"offset" = 0'),
    _set("outcome that is none", "outcome = 'received'"),
    _set("outcome in capitals", "outcome = 'DELIVERED'"),
    _set("delivered becomes dropped", "outcome = 'dropped'"),
    Fault(
        "receipt: dropped becomes delivered",
        "dropped",
        f"update receipt set outcome = 'delivered' {_AT}",
        (WRONG,),
        ("never_consumed",),
    ),
    _set("no try", "attempts = 0"),
    _set("a try too many", "attempts = 2"),
    _set("a million tries", "attempts = 1000000"),
    _set("fewer than no tries", "attempts = -1"),
    _set("a try too few", "attempts = 1", of="tried"),
    _set("first tried a day before its commit", "first_at = first_at - interval '1 day'"),
    _set("first tried in 2099", "first_at = '2099-01-01'"),
    _set("first tried an hour after it was settled", "first_at = settled_at + interval '1 hour'"),
    _set(
        "first tried and settled an hour before its commit",
        "first_at = first_at - interval '1 hour', settled_at = settled_at - interval '1 hour'",
    ),
    _set("settled an hour before its first try", "settled_at = settled_at - interval '1 hour'"),
    _set("settled ten seconds before its first try", "settled_at = settled_at - interval '10 s'"),
    _set("settled in 2099", "settled_at = '2099-01-01'"),
    _set("negative duration", "duration_ms = -1"),
    _set("duration of eleven days", "duration_ms = 1000000000"),
    _set("status 500", "status = 500", ledgers=ANSWER),
    _set("status 404", "status = 404", ledgers=ANSWER),
    _set("status 302", "status = 302", ledgers=ANSWER),
    _set("status 99", "status = 99", ledgers=ANSWER),
    _set("status is gone", "status = null"),
    Fault(
        "receipt: another status of success",
        "plain",
        f"update receipt set status = 204 {_AT}",
        (),
        ANSWER,
        "ledgers",
        "Only the consumer knows which one it answered",
    ),
    Fault(
        "receipt: another duration",
        "plain",
        f"update receipt set duration_ms = duration_ms + 1 {_AT}",
        (),
        (),
        "certificate",
        "Nothing else has it: the same requests and answers over a slower network have the same ledgers",
    ),
    _set("digest", "digest = sha256('x')", "content_differs"),
    _set("digest is empty", "digest = ''", "content_differs"),
    _set("digest is gone", "digest = null"),
    _set("replay that never was", "replay = 7777", "undelivered", WRONG),
    _set("live becomes replayed", "replay = (select max(replay_id) + 5 from replay)", "undelivered", WRONG),
    _set("the offset of a replay's", '"offset" = "offset" + 1', rows=_REPLAYED),
    _set("the digest of a replay's", "digest = sha256('x')", "content_differs", rows=_REPLAYED),
    _set("a replay's first try before the replay", "first_at = first_at - interval '1 day'", rows=_REPLAYED),
    _set("a replay's status", "status = 503", rows=_REPLAYED, ledgers=ANSWER),
    Fault(
        "receipt: a replay's is gone",
        "plain",
        f"delete from receipt {_REPLAYED}",
        ("replay_incomplete=plains:{replay}",),
    ),
    Fault("receipt: gone", "plain", f"delete from receipt {_AT}", ("undelivered",)),
    Fault(
        "receipt: gone, with its replay's",
        "plain",
        f"with one as (delete from receipt {_REPLAYED}) delete from receipt {_AT}",
        ("undelivered", "replay_incomplete=plains:{replay}"),
    ),
    Fault("receipt: gone, of a message with two", "sale", f"delete from receipt {_AT}", ("undelivered",)),
    Fault("receipt: gone after a retry", "tried", f"delete from receipt {_AT}", ("undelivered",)),
    Fault("receipt: gone, of a dropped dead letter", "dropped", f"delete from receipt {_AT}", ("delivery_wrong",)),
    Fault("receipt: gone, of a check's commit", "checked", f"delete from receipt {_AT}", ("undelivered",)),
    Fault("receipt: gone, of a reissue", "reissued", f"delete from receipt {_AT}", ("undelivered",)),
    _copy(
        "invented for another subscription",
        "subscription_id = (select subscription_id from subscription where name = 'sales')",
        "receipt_not_matched={id}-0:{sales}",
    ),
    _copy("invented for an unknown subscription", "subscription_id = 8888", "receipt_not_matched={id}-0:8888"),
    _copy("invented for a replay that never was", "replay = 6666", WRONG),
    _copy("invented for another message", "position = 9", "receipt_without_message={id}-9:{subscription}"),
    Fault(
        "receipt: invented for a rolled-back transaction",
        "back",
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, status, digest, settled_at) select transaction_id, position, s.subscription_id, 1, 'delivered', "
        "1, now(), 5, 200, body_digest, now() from half, subscription s where transaction_id = %(id)s and position = 0 "
        "and s.name = 'sales'",
        ("receipt_without_message={id}-0:{sales}",),
    ),
    _set(
        "delayed: sent before it was due",
        "first_at = first_at - interval '1 minute'",
        "receipt_wrong={id}-1:{subscription}",
        of="sale",
        rows=_AT.replace("position = 0", "position = 1"),
    ),
    Fault(
        "receipt: also waits for a retry",
        "plain",
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "due_at) select subscription_id, transaction_id, position, \"offset\", 'plain', 1, first_at, now() + interval "
        f"'1 minute' from receipt {_AT}",
        ("delivery_wrong",),
    ),
]
