"""Faults of whole subscriptions: their receipts, checkpoints, versions and rows."""

from tests.spark.planted.fault import Fault

_S = "subscription_id = %(subscription)s"
_RECEIPTS = f"delete from receipt where {_S}"
_BACK = f'update checkpoint set "offset" = 0 where {_S}'


def _of(name: str, sql: str, *finds: str) -> Fault:
    return Fault(f"subscription: {name}", "line", sql, finds)


NOT_MATCHED = tuple(f"receipt_not_matched={{{one}}}-0:{{subscription}}" for one in ("id", "second", "third"))


EACH = ("undelivered", "undelivered={second}-0:{subscription}", "undelivered={third}-0:{subscription}")
FAULTS = [
    _of("all receipts", _RECEIPTS, *EACH),
    _of("all receipts, checkpoint set back", f"with one as ({_RECEIPTS}) {_BACK}", "delivery_late"),
    _of(
        "all receipts and its checkpoint",
        f"with one as ({_RECEIPTS}) delete from checkpoint where {_S}",
        "checkpoint_differs",
        "delivery_late",
    ),
    _of("its checkpoint", f"delete from checkpoint where {_S}", "checkpoint_differs"),
    _of("a shard of its checkpoint", f"update checkpoint set shards = 2 where {_S}", "checkpoint_differs"),
    _of("another shard's checkpoint", f"update checkpoint set shard = 5 where {_S}", "checkpoint_differs"),
    _of("its checkpoint beyond the log", f'update checkpoint set "offset" = 900000 where {_S}', "checkpoint_differs"),
    _of("its checkpoint set back", _BACK, "checkpoint_differs"),
    _of("its checkpoint below 0", f'update checkpoint set "offset" = -9 where {_S}', "checkpoint_differs"),
    _of(
        "all receipts, paused by hand",
        f"with one as ({_RECEIPTS}) update subscription set state = 'paused' where {_S}",
        *EACH,
        "subscription_differs",
    ),
    _of(
        "all receipts, checkpoint set back, paused by hand",
        f"with one as ({_RECEIPTS}), two as ({_BACK}) update subscription set state = 'paused' where {_S}",
        "subscription_differs",
    ),
    _of(
        "all receipts, checkpoint set back, disabled by hand",
        f"with one as ({_RECEIPTS}), two as ({_BACK}) update subscription set state = 'disabled' where {_S}",
        "subscription_differs",
    ),
    _of(
        "all receipts and the row",
        f"with one as ({_RECEIPTS}) delete from subscription where {_S}",
        *EACH,
        "subscription_differs",
    ),
    _of(
        "all receipts, deleted by hand",
        f"with one as ({_RECEIPTS}) update subscription set deleted_at = now() - interval '2 days' where {_S}",
        "unrouted",
        "subscription_differs",
    ),
    _of(
        "all receipts, begun later by hand",
        f"with one as ({_RECEIPTS}) update subscription set started_after = 900000 where {_S}",
        "unrouted",
        "subscription_differs",
    ),
    _of(
        "all receipts, other topics by hand",
        f"with one as ({_RECEIPTS}) update subscription set topics = '{{none}}' where {_S}",
        "unrouted",
        "subscription_differs",
    ),
    _of("its versions", f"delete from subscription_version where {_S}", "subscription_differs", *NOT_MATCHED),
    _of(
        "its versions and receipts",
        f"with one as ({_RECEIPTS}) delete from subscription_version where {_S}",
        "subscription_differs",
        "unrouted",
    ),
    _of(
        "its versions are of other topics, all receipts",
        f"with one as ({_RECEIPTS}) update subscription_version set topics = '{{none}}' where {_S}",
        "subscription_differs",
        "unrouted",
    ),
    _of(
        "a version paused it, all receipts, checkpoint set back",
        f"with one as ({_RECEIPTS}), two as ({_BACK}) update subscription_version set state = 'paused' where {_S}",
        "subscription_differs",
    ),
    _of(
        "its versions say that it began later, all receipts",
        f"with one as ({_RECEIPTS}) update subscription_version set started_after = 900000 where {_S}",
        "subscription_differs",
        "unrouted",
    ),
    _of(
        "its versions say that it is deleted, all receipts",
        f"with one as ({_RECEIPTS}) update subscription_version set deleted_at = at where {_S}",
        "subscription_differs",
        "unrouted",
    ),
    _of("its topics by hand", f"update subscription set topics = '{{none}}' where {_S}", "subscription_differs"),
    _of(
        "its receipts are another's",
        "update receipt set subscription_id = (select subscription_id from subscription where name = 'reissues') "
        f"where {_S}",
        *EACH,
        "receipt_not_matched={id}-0:{reissues}",
        "receipt_not_matched={second}-0:{reissues}",
        "receipt_not_matched={third}-0:{reissues}",
    ),
    _of(
        "all receipts dropped by nobody",
        f"update receipt set outcome = 'dropped' where {_S}",
        "receipt_wrong",
        "receipt_wrong={second}-0:{subscription}",
        "receipt_wrong={third}-0:{subscription}",
    ),
    _of(
        "all receipts an hour earlier",
        "update receipt set first_at = first_at - interval '1 hour', settled_at = settled_at - interval '1 hour' "
        f"where {_S}",
        "receipt_wrong",
        "receipt_wrong={second}-0:{subscription}",
        "receipt_wrong={third}-0:{subscription}",
    ),
]
