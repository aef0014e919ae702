"""Whole transactions that are removed or invented, alone or with all that speaks of them."""

from tests.spark.planted.fault import Fault

_T = "where transaction_id = %(id)s"


def _all_but(*kept: str) -> str:
    tables = [one for one in ("receipt", "outbox", "attempt", "half", "op") if one not in kept]
    ctes = [f"d{number} as (delete from {table} {_T})" for number, table in enumerate(tables[:-1])]
    return f"with {', '.join(ctes)} delete from {tables[-1]} {_T}"


GONE = "All its rows are gone. Offsets have gaps for other reasons too, so nothing in the tables shows it"
LOST = ("ledger_not_sent", "consumed_not_sent")
TWO = ("consumed_not_sent", "consumed_not_sent={id}-1")
FAULTS = [
    Fault("transaction: all but its half", "sale", _all_but("half"), ("half_stuck",), ("ledger_not_sent", *TWO)),
    Fault("transaction: all but its op", "sale", _all_but("op"), ("op_without_half",), ("ledger_not_sent", *TWO)),
    Fault(
        "transaction: all but its messages",
        "plain",
        _all_but("outbox"),
        ("published_without_commit", "undelivered"),
        ("ledger_not_sent",),
    ),
    Fault(
        "transaction: all but its receipts",
        "plain",
        _all_but("receipt"),
        ("receipt_without_message",),
        ("ledger_not_sent", "consumed_not_sent"),
    ),
    Fault(
        "transaction: half and op",
        "plain",
        _all_but("outbox", "receipt", "attempt"),
        ("published_without_commit",),
        ("ledger_not_sent",),
    ),
    Fault(
        "transaction: outbox and receipts",
        "plain",
        _all_but("half", "op", "attempt"),
        ("committed_not_published",),
        ("consumed_not_sent",),
    ),
    Fault("transaction: gone, of a person's verdict", "decided", _all_but(), ("verdict_unproven",), LOST),
    Fault(
        "transaction: gone, of a person's verdict, with a row of check_back that upkeep has not removed yet",
        "decided",
        "with waits as (insert into check_back (transaction_id, producer_group, state, swept_at, parked_at) "
        f"values (%(id)s, 'unsure', 2, now(), now())), {_all_but().removeprefix('with ')}",
        ("verdict_unproven", "parked"),
        LOST,
    ),
    Fault("transaction: gone, of a reissue", "reissued", _all_but(), ("verdict_unproven",), LOST),
    Fault("transaction: gone, committed", "plain", _all_but(), (), LOST, "ledgers", GONE),
    Fault(
        "transaction: gone, of two messages",
        "sale",
        _all_but(),
        (),
        ("ledger_not_sent", *TWO),
        "ledgers",
        GONE,
    ),
    Fault("transaction: gone, rolled back", "back", _all_but(), (), ("ledger_disagrees",), "ledgers", GONE),
]
