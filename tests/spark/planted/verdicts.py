"""Faults of verdicts and of what they rest on: `op`, the attempts of checks, and the audit."""

from tests.spark.planted.fault import Fault

_AT = "where transaction_id = %(id)s"


def _set(name: str, change: str, *finds: str, of: str, ledgers: tuple[str, ...] = ()) -> Fault:
    return Fault(f"op: {name}", of, f"update op set {change} {_AT}", finds, ledgers)


OWN = "A producer's own end leaves no evidence besides `op`"
DISAGREES = ("ledger_disagrees",)
FAULTS = [
    _set(
        "commit becomes a rollback",
        "verdict = 2",
        "published_after_rollback",
        "published_after_rollback={id}-1",
        of="sale",
        ledgers=DISAGREES,
    ),
    _set("rollback becomes a commit", "verdict = 1", "committed_not_published", of="back", ledgers=DISAGREES),
    _set(
        "commit of a check becomes a rollback",
        "verdict = 2",
        "published_after_rollback",
        "verdict_unproven",
        of="checked",
        ledgers=DISAGREES,
    ),
    _set(
        "rollback of policy becomes a commit",
        "verdict = 1",
        "committed_not_published",
        "verdict_unproven",
        of="exhausted",
        ledgers=DISAGREES,
    ),
    _set("source: a producer's becomes a check's", "source = 1", "verdict_unproven", of="sale"),
    _set("source: a producer's becomes policy's", "source = 2", "verdict_unproven", of="back"),
    _set("source: a producer's commit becomes policy's", "source = 2", "verdict_unproven", of="sale"),
    _set("source: a producer's becomes a person's", "source = 3", "verdict_unproven", of="sale"),
    _set("source: a rollback becomes a person's", "source = 3", "verdict_unproven", of="back"),
    _set("source: a check's becomes the producer's", "source = 0", "verdict_unproven", of="checked"),
    _set("source: a check's becomes policy's", "source = 2", "verdict_unproven", of="denied"),
    _set("source: a check's becomes a person's", "source = 3", "verdict_unproven", of="checked"),
    _set("source: policy's becomes the producer's", "source = 0", "verdict_unproven", of="exhausted"),
    _set("source: policy's becomes a check's", "source = 1", "verdict_unproven", of="exhausted"),
    _set("source: a person's becomes the producer's", "source = 0", "verdict_unproven", of="decided"),
    _set("source: a person's becomes a check's", "source = 1", "verdict_unproven", of="decided"),
    _set("source: a person's becomes policy's", "source = 2", "verdict_unproven", of="decided"),
    _set("actor of a person", "actor = 'mallory'", "verdict_unproven", of="decided"),
    _set("actor of a producer", "actor = 'mallory'", "verdict_unproven", of="sale"),
    _set("reason of a person", "reason = 'forged'", "verdict_unproven", of="decided"),
    _set("reason is gone", "reason = null", "verdict_unproven", of="decided"),
    _set("reason of a reissue", "reason = 'forged'", "verdict_unproven", of="reissued"),
    Fault(
        "op: reason of a producer",
        "sale",
        f"update op set reason = 'forged' {_AT}",
        (),
        DISAGREES,
        "ledgers",
        OWN,
    ),
    _set(
        "decided a day before its birth",
        "decided_at = decided_at - interval '1 day'",
        "times_disagree",
        of="sale",
        ledgers=DISAGREES,
    ),
    _set(
        "decided an hour before its birth",
        "decided_at = decided_at - interval '1 hour'",
        "times_disagree",
        of="back",
        ledgers=DISAGREES,
    ),
    _set("decided in 2099", "decided_at = '2099-01-01'", "times_disagree", of="back", ledgers=DISAGREES),
    _set(
        "decided after its commit",
        "decided_at = now() + interval '2 s'",
        "times_disagree",
        "times_disagree={id}-1",
        of="sale",
        ledgers=DISAGREES,
    ),
    Fault(
        "op: a rollback decided an hour later",
        "back",
        f"update op set decided_at = decided_at + interval '1 hour' {_AT}",
        (),
        DISAGREES,
        "ledgers",
        "An end may come at any time after the half",
    ),
    Fault(
        "op: the row is gone",
        "sale",
        f"delete from op {_AT}",
        ("half_stuck", "published_without_commit", "published_without_commit={id}-1"),
        ("ledger_not_sent",),
    ),
    Fault("op: the row of a rolled-back one is gone", "back", f"delete from op {_AT}", ("half_stuck",), DISAGREES),
    Fault(
        "op: the verdict moved to another transaction",
        "back",
        f"update op set transaction_id = overlay(transaction_id::text placing 'ffff' from 15 for 4)::uuid {_AT}",
        ("half_stuck", "op_without_half={moved}"),
        DISAGREES,
    ),
    Fault(
        "attempt: the check that decided is gone",
        "checked",
        f"delete from attempt {_AT} and kind = 'check'",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: the check that denied is gone",
        "denied",
        f"delete from attempt {_AT} and kind = 'check'",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: the check that decided said something else",
        "checked",
        f"update attempt set outcome = 'rollback', verdict = 2 {_AT} and kind = 'check'",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: the check that decided was not answered",
        "checked",
        f"update attempt set outcome = 'unanswered', verdict = null {_AT} and kind = 'check'",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: the check that decided said unknown",
        "denied",
        f"update attempt set outcome = 'unknown', verdict = null {_AT} and kind = 'check'",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: the checks before policy's verdict are gone",
        "exhausted",
        f"delete from attempt {_AT} and kind = 'check'",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: a check before policy's verdict is gone",
        "exhausted",
        f"delete from attempt {_AT} and kind = 'check' and number = 1",
        ("verdict_unproven",),
    ),
    Fault(
        "attempt: too many checks",
        "back",
        "insert into attempt (transaction_id, kind, at, number, outcome, source) select %(id)s::uuid, 'check', now(), "
        "n, 'unknown', 1 from generate_series(1, 12) n",
        ("checks_beyond_max",),
    ),
    Fault(
        "attempt: a refused end is invented",
        "reissued",
        "insert into attempt (transaction_id, kind, at, outcome, verdict, source) values "
        "(%(id)s, 'refused', now(), 'refused', 2, 0)",
        ("verdict_refused=shop",),
    ),
    Fault(
        "audit: the row of a person's verdict is gone",
        "decided",
        "delete from audit where target = %(id)s and what = 'transaction.verdict'",
        ("verdict_unproven", "audit_broken={audit_next}"),
    ),
    Fault(
        "audit: the actor of a person's verdict",
        "decided",
        "update audit set actor = 'mallory' where target = %(id)s",
        ("verdict_unproven", "audit_broken={audit}"),
    ),
    Fault(
        "audit: the time of a person's verdict",
        "decided",
        "update audit set at = at - interval '1 day' where target = %(id)s",
        ("audit_broken={audit}",),
    ),
    Fault(
        "audit: the reason of a person's verdict",
        "decided",
        "update audit set detail = '{}' where target = %(id)s",
        ("verdict_unproven", "audit_broken={audit}"),
    ),
    Fault(
        "check_back: parked although it was decided by nobody",
        "back",
        f"with gone as (delete from op {_AT}) insert into check_back (transaction_id, producer_group, state, swept_at, "
        "parked_at) values (%(id)s, 'seller', 2, now(), now())",
        ("parked",),
        DISAGREES,
    ),
    Fault(
        "check_back: the next check in 2099",
        "back",
        f"with gone as (delete from op {_AT}) insert into check_back (transaction_id, producer_group, state, swept_at, "
        "next_check_at) values (%(id)s, 'seller', 1, now(), '2099-01-01')",
        ("half_stuck",),
        DISAGREES,
    ),
    Fault(
        "check_back: the next check a day ago",
        "back",
        f"with gone as (delete from op {_AT}) insert into check_back (transaction_id, producer_group, state, swept_at, "
        "next_check_at) values (%(id)s, 'seller', 1, now(), now() - interval '1 day')",
        ("half_stuck",),
        DISAGREES,
    ),
]
