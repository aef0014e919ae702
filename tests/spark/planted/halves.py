"""Faults of rows of `half`: each column, and rows that are gone, invented or moved."""

from tests.spark.planted.fault import Fault

_AT = "where transaction_id = %(id)s and position = 0"
_ALL = "where transaction_id = %(id)s"
BOTH = ("published_differs", "half_altered")
_EARLIER = "born_at = born_at - interval '{0}', first_check_at = first_check_at - interval '{0}'"


def _set(name: str, change: str, *finds: str, of: str = "sale", rows: str = _AT) -> Fault:
    return Fault(f"half: {name}", of, f"update half set {change} {rows}", finds)


FAULTS = [
    _set("topic", "topic = 'plain'", *BOTH),
    _set("topic of a rolled-back one", "topic = 'plain'", "half_altered", of="back"),
    _set("key", "key = 'another'", *BOTH),
    _set("key is gone", "key = null", *BOTH),
    _set("key of a plain message", "key = 'another'", *BOTH, of="plain"),
    _set("tag", "tag = 'old'", *BOTH),
    _set("tag is gone", "tag = null", *BOTH),
    _set("one header more", 'headers = headers || \'{"x": "y"}\'', "half_altered"),
    _set("a header's value", 'headers = \'{"region": "us"}\'', "half_altered"),
    _set("headers are gone", "headers = null", "half_altered"),
    _set("content type", "content_type = 'text/html'", "half_altered"),
    _set("body", "body = 'forged'", "half_altered"),
    _set("body of a rolled-back one", "body = 'forged'", "half_altered", of="back"),
    _set("body is empty", "body = ''", "half_altered", of="plain"),
    _set(
        "body and its digest",
        "body = 'forged', body_digest = sha256('forged')",
        "half_altered",
        "content_differs",
        of="plain",
    ),
    _set("body digest", "body_digest = sha256('x')", "half_altered", "content_differs", of="plain"),
    _set("delay", "deliver_after_s = 3600", *BOTH),
    _set("delay is gone", "deliver_after_s = null", "published_differs={id}-1", "half_altered", rows=_ALL),
    _set("group of one message", "producer_group = 'shop'", "half_altered"),
    _set("group of all messages", "producer_group = 'shop'", "half_altered", rows=_ALL),
    _set("digest", "digest = sha256('x')", "half_altered"),
    _set("digest is gone", "digest = null", "half_altered"),
    _set("digest of a plain message", "digest = sha256('x')", "half_altered", of="plain"),
    _set("context", "context = '{\"order\": 8}'", "half_altered"),
    _set("context is gone", "context = null", "half_altered"),
    _set("a context is invented", "context = '{\"order\": 8}'", "half_altered", of="plain"),
    _set("policy", "policy = '{\"max_checks\": 1}'", "half_altered"),
    _set("policy is gone", "policy = null", "half_altered"),
    _set(
        "born an hour earlier, one message",
        "born_at = born_at - interval '1 hour'",
        "times_disagree",
        "times_disagree={id}-1",
    ),
    _set("born a day later", "born_at = born_at + interval '1 day'", "times_disagree", of="plain"),
    _set("born in the year 2099", "born_at = '2099-01-01'", "times_disagree", "times_disagree={id}-1", of="back"),
    _set("born a day earlier, with its first check", _EARLIER.format("1 day"), "times_disagree", rows=_ALL),
    _set("born an hour earlier, with its first check", _EARLIER.format("1 hour"), "times_disagree", rows=_ALL),
    _set("first check in 2099", "first_check_at = '2099-01-01'", "times_disagree", of="back", rows=_ALL),
    _set(
        "first check before its birth",
        "first_check_at = born_at - interval '1 hour'",
        "times_disagree",
        "times_disagree={id}-1",
    ),
    _set("reissue of another", "reissued_from = transaction_id", "half_altered", "verdict_unproven", of="reissued"),
    _set("reissue is forgotten", "reissued_from = null", "half_altered", "verdict_unproven", of="reissued"),
    _set("a reissue is invented", "reissued_from = transaction_id", "half_altered"),
    Fault(
        "half: contents are swapped",
        "sale",
        "update half a set key = b.key, tag = b.tag, headers = b.headers, body = b.body, body_digest = b.body_digest, "
        "deliver_after_s = b.deliver_after_s from half b where a.transaction_id = %(id)s and b.transaction_id = %(id)s "
        "and a.position = 1 - b.position",
        (*BOTH, "published_differs={id}-1", "content_differs", "content_differs={id}-1"),
    ),
    Fault(
        "half: the first row is gone", "sale", f"delete from half {_AT}", ("published_without_commit", "half_altered")
    ),
    Fault(
        "half: the second row is gone",
        "sale",
        "delete from half where transaction_id = %(id)s and position = 1",
        ("published_without_commit={id}-1", "half_altered"),
    ),
    Fault(
        "half: a row of a rolled-back one is gone",
        "back",
        "delete from half where transaction_id = %(id)s and position = 1",
        ("half_altered",),
    ),
    Fault("half: all rows are gone", "sale", f"delete from half {_ALL}", ("op_without_half",), ("ledger_not_sent",)),
    Fault("half: all rows of a rolled-back one are gone", "back", f"delete from half {_ALL}", ("op_without_half",)),
    Fault(
        "half: a message more",
        "sale",
        'insert into half select (jsonb_populate_record(h, \'{"position": 2, "digest": null}\')).* from half h '
        "where transaction_id = %(id)s and position = 1",
        ("half_altered", "committed_not_published"),
    ),
    Fault(
        "half: a row moved to another position",
        "sale",
        "update half set position = 5 where transaction_id = %(id)s and position = 1",
        ("half_altered", "op_without_half", "committed_not_published", "published_without_commit={id}-1"),
    ),
]
