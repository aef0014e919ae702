"""Plants faults, each in a victim of its own, and says what must be found of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark.postgres.connections import Connection
from tests.spark.planted import deliveries, halves, published, receipts, subscriptions, transactions, verdicts
from tests.spark.planted.day import victims
from tests.spark.planted.fault import Fault, Found

MODULES = (halves, published, verdicts, receipts, deliveries, subscriptions, transactions)
FAULTS: tuple[Fault, ...] = tuple(fault for module in MODULES for fault in module.FAULTS)

# What the producers and consumers know, of the day as it is before any fault.
PRODUCERS = """
select transaction_id::text, case verdict when 1 then 'commit' else 'rollback' end as verdict,
  case source when 0 then decided_at end as end_decided_at,
  case source when 0 then coalesce(reason, '') end as end_reason
from op
"""
CONSUMERS = """
select r.transaction_id || '-' || r.position as message_id, 1 as times_seen,
  array_agg(distinct r.status) filter (where r.status is not null) as answered
from receipt r join outbox o using (transaction_id, position) where r.outcome = 'delivered' group by 1
"""

ACT = """
select audit_id as audit, audit_id + 1 as audit_next from audit where target = %s and what = 'transaction.verdict'
"""
NEXT = 'select min("offset") as "offset" from outbox where "offset" > %s'


@dataclass(frozen=True)
class Planted:
    """A fault and its victim."""

    fault: Fault
    victim: dict[str, Any]

    @property
    def by_tables(self) -> set[Found]:
        """What the rules over tables must find."""
        return self.fault.found(self.victim, self.fault.finds)

    @property
    def by_ledgers(self) -> set[Found]:
        """What the rules over ledgers must find."""
        return self.fault.found(self.victim, self.fault.ledgers)


def plant(connection: Connection, faults: Iterable[Fault] = FAULTS) -> list[Planted]:
    """Plant all faults in one database; each must change something."""
    pools, done = victims(connection), []
    connection.execute("alter table outbox drop constraint outbox_pkey")
    for one in give_victims(connection, pools, faults):
        try:
            changed = connection.execute(one.fault.sql, one.victim).rowcount
        except Exception as error:
            raise AssertionError(f"{one.fault.name}: {error}") from error
        assert changed >= 1, one.fault.name
        done.append(one)
    for one in done:
        one.victim["after"] = connection.execute(NEXT, [one.victim["offset"]]).fetchone()["offset"]
    return done


def give_victims(
    connection: Connection, pools: Mapping[str, Iterator[dict[str, Any]]], faults: Iterable[Fault]
) -> list[Planted]:
    """Return each fault with the next victim of its sort; nothing is changed."""
    return [Planted(fault, _victim(connection, pools[fault.of], fault)) for fault in faults]


def _victim(connection: Connection, pool: Iterator[dict[str, Any]], fault: Fault) -> dict[str, Any]:
    try:
        victim = next(pool)
    except StopIteration:
        raise AssertionError(f"too few victims of the sort {fault.of}") from None
    names = {row["name"]: row["subscription_id"] for row in connection.execute("select * from subscription").fetchall()}
    victim |= {name: number for name, number in names.items() if "." not in name}
    victim |= {"next": victim["offset"] + 1, "high": victim["offset"] + 100_000, "replay": 2}
    victim["moved"] = f"{victim['id'][:14]}ffff{victim['id'][18:]}"
    if fault.of == "decided":
        victim |= connection.execute(ACT, [victim["id"]]).fetchone()
    if fault.of == "line":
        ids = connection.execute(
            'select transaction_id::text as id from outbox where topic = %s order by "offset"', [victim["name"]]
        ).fetchall()
        victim |= {"id": ids[0]["id"], "second": ids[1]["id"], "third": ids[2]["id"]}
    return victim
