"""An examination of the proof: hundreds of faults in a day that the real service made, and what is found of them."""

import asyncio
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark import schemas
from spark.certificate.tree import COLUMNS
from spark.engine.progress import Progress
from spark.frames import Frames
from spark.postgres.connections import Connection, connect
from spark.proof.early_search import EarlySearch
from spark.proof.prove_day import ReadDay
from spark.proof.read_days import Wish, read_days
from spark.sources import deliveries, half_digests, id_ranges, received, subscriptions
from spark.transforms import rules
from spark.transforms.joined import Joined
from spark.transforms.rules import RULES, found_in, joined
from tests.conftest import migrated_template
from tests.spark.conftest import frame
from tests.spark.days import ROOT
from tests.spark.planted import docs
from tests.spark.planted.day import after, before, victims
from tests.spark.planted.fault import Fault, Found
from tests.spark.planted.planting import CONSUMERS, FAULTS, PRODUCERS, Planted, give_victims, plant
from tests.spark.planted.wholes import WHOLES, Whole
from tests.spark.real import make_day
from tests.spark.test_real_day import day_of
from tests.support import postgres

LEDGERS = {rule.kind for rule in RULES if rule.needs in ("producer_ledger", "consumer_ledger")}
# No fault of these in the tables of one day: tests/spark/test_archive_faults.py, test_certified_days.py, test_usual.py,
# test_key_order.py, test_real_day.py, and test_installations.py have them.
ELSEWHERE = {"archive_differs", "certificate_differs", "fewer_than_usual", "order_broken", "in_two_installations"}
# A consumer that takes a message twice is no fault of Halfnote's rows.
ELSEWHERE |= {"consumed_twice"}
# Findings that are always beside another one of the same fault.
NEVER_ALONE = {"offset_of_two_messages", "unrouted", "retry_overdue", "retry_never_due"}
LEAST_BY_TABLES = 0.97
# No ledger can show it: docs/guarantees.md says why. A certificate shows it.
BEYOND_LEDGERS = {"receipt: another duration"}
# What a query says of a row that differs.
WORD = re.compile(r"(?:then|else) '([a-z_ ]+)' end")


@dataclass(frozen=True)
class Proved:
    """The faults that were planted, what the rules read, and what they found."""

    planted: list[Planted]
    joined: Joined
    found: Mapping[Found, str]


@pytest.fixture(scope="module", autouse=True)
def moved_at_once() -> Iterator[None]:
    """Checkpoints need no time to follow: the day is minutes old, and its workers have ended."""
    since = "'{{seen}}'::timestamptz - interval '{}'"
    at_once = subscriptions.DIFFERING.replace(since.format(subscriptions.MOVES_WITHIN), since.format("0 s"))
    assert at_once != subscriptions.DIFFERING
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subscriptions, "DIFFERING", at_once)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a database with the day, whose partitions were made ahead."""
    url = postgres.create_database(migrated_template())
    asyncio.run(make_day(url, tmp_path_factory.mktemp("workers"), before, after))
    with connect(url) as connection:
        connection.execute("update day set changed_at = day::timestamptz - interval '1 day'")
    yield url
    postgres.drop_database(url)


@pytest.fixture
def copy(made: str) -> Iterator[str]:
    """The url of a copy of it."""
    url = postgres.create_database(made.rpartition("/")[2])
    yield url
    postgres.drop_database(url)


def read_day(spark: SparkSession, url: str, day_made: date, path: Path) -> ReadDay:
    """Return the day as a run reads it."""
    wish = Wish([day_made], {}, 3600)
    [day] = read_days(spark, url, wish, str(path / "staged"), Progress(stream=io.StringIO())).days
    return day


def read(spark: SparkSession, url: str, day_made: date, path: Path) -> Frames:
    """Return the frames of the day, as a run reads them."""
    return read_day(spark, url, day_made, path).frames


def ledgers_of(spark: SparkSession, url: str) -> dict[str, object]:
    """Return what the producers and consumers have of the day."""
    with connect(url) as connection:
        producers, consumers = (connection.execute(one).fetchall() for one in (PRODUCERS, CONSUMERS))
    return {
        "producer_ledger": frame(spark, schemas.PRODUCER_LEDGER, producers),
        "consumer_ledger": frame(spark, schemas.CONSUMER_LEDGER, consumers),
        "producer_ledger_complete": True,
    }


def proved(spark: SparkSession, f: Frames, planted: list[Planted]) -> Proved:
    """Apply all rules; everything was due at once."""
    j = joined(f, 0.0)
    return Proved(planted, j, {(row.kind, row.subject): row.detail for row in found_in(j).collect()})


@pytest.fixture(scope="module")
def examined(spark: SparkSession, made: str, tmp_path_factory: pytest.TempPathFactory) -> Proved:
    """The proof of the day with all faults, each in a victim of its own."""
    known = ledgers_of(spark, made)
    url = postgres.create_database(made.rpartition("/")[2])
    try:
        with connect(url) as connection:
            planted = plant(connection)
        f = read(spark, url, day_of(made), tmp_path_factory.mktemp("planted"))
    finally:
        postgres.drop_database(url)
    return proved(spark, replace(f, **known), planted)


def test_the_day_without_faults_has_no_finding(spark: SparkSession, made: str, tmp_path: Path) -> None:
    f = replace(read(spark, made, day_of(made), tmp_path), **ledgers_of(spark, made))
    assert proved(spark, f, []).found == {}


def test_exactly_what_was_planted_is_found(examined: Proved) -> None:
    wanted = {found: one.fault.name for one in examined.planted for found in one.by_tables | one.by_ledgers}
    assert sorted((found, examined.found[found]) for found in examined.found.keys() - wanted.keys()) == []
    assert sorted((found, wanted[found]) for found in wanted.keys() - examined.found.keys()) == []


def test_a_day_that_is_searched_while_it_is_read_has_the_same_findings(
    spark: SparkSession, made: str, copy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[Mapping[str, Sequence[str]]] = []
    look = EarlySearch.look

    def looked(search: EarlySearch, frames: Frames) -> Mapping[str, Sequence[str]]:
        named.append(look(search, frames))
        return named[-1]

    with connect(copy) as connection:
        plant(connection)
    whole = read(spark, copy, day_of(made), tmp_path / "whole")
    monkeypatch.setattr(rules, "SMALL_DAY", 0)
    # So that the day has several ranges, for which the search is prepared.
    monkeypatch.setattr(id_ranges, "PAGES_AT_ONCE", 4)
    monkeypatch.setattr(EarlySearch, "look", looked)
    searched = read_day(spark, copy, day_of(made), tmp_path / "named")
    some = searched.frames
    assert [list(ids) for ids in named] == [["differing", "wrong_receipt"]]
    for name, ids in named[0].items():
        found = getattr(whole, name).collect()
        assert sorted(getattr(some, name).collect()) == sorted(found)
        assert len(found) > 10
        assert len(ids) < some.rows["half"] / 2
    later = joined(some, 0.0, tmp_path / "joined", searched.searched)
    assert searched.joined is not None
    early = replace(searched.joined, whole=some)
    assert later.counts == early.counts is not None
    found_whole = proved(spark, whole, []).found
    # How late a delivery is depends on the time of the snapshot.
    by_joins, *by_search = (
        {about: re.sub(r'"lag_s":[0-9.]+', "", detail) for about, detail in found.items()}
        for found in (
            found_whole,
            *({(row.kind, row.subject): row.detail for row in found_in(j).collect()} for j in (later, early)),
        )
    )
    assert by_search == [by_joins, by_joins]


def test_the_share_that_is_found(examined: Proved, copy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all of them; each that the tables do not show has its reason in docs/guarantees.md."""
    assert len(FAULTS) >= 150
    tables = {one.fault.name for one in examined.planted if one.by_tables & examined.found.keys()}
    ledgers = {one.fault.name for one in examined.planted if one.by_ledgers & examined.found.keys()} | tables
    with connect(copy) as connection:
        certificate = {fault.name for fault in FAULTS if differs_from_certificate(connection, fault)} | ledgers
    with capsys.disabled():
        for by, found in (("tables", tables), ("ledgers", ledgers), ("certificate", certificate)):
            missed = [fault.name for fault in FAULTS if fault.name not in found]
            print(f"\n{by}: {len(found)} of {len(FAULTS)} ({len(found) / len(FAULTS):.3f})", *missed, sep="\n  ")
    assert {fault.name for fault in FAULTS if fault.by == "tables"} == tables
    assert {fault.name for fault in FAULTS if fault.by in ("tables", "ledgers")} == ledgers
    assert len(tables) >= LEAST_BY_TABLES * len(FAULTS)
    assert {fault.name for fault in FAULTS} - ledgers == BEYOND_LEDGERS
    assert len(certificate) == len(FAULTS)


@pytest.mark.parametrize("kind", sorted({rule.kind for rule in RULES} - ELSEWHERE))
def test_without_its_rule_a_fault_is_not_found(examined: Proved, kind: str) -> None:
    """And only what the rule finds is missing, so whichever rule is off, this test fails."""
    others = frozenset(rule.kind for rule in RULES) - {kind}
    own = {(row.kind, row.subject) for row in found_in(examined.joined, others).collect()}
    assert own == {found for found in examined.found if found[0] == kind}
    assert own
    of_sort = [one.by_ledgers if kind in LEDGERS else one.by_tables for one in examined.planted]
    assert kind in NEVER_ALONE or {kind} in [{found[0] for found in wanted} for wanted in of_sort]


@pytest.mark.parametrize(
    ("kind", "query"),
    [
        ("receipt_wrong", received.WRONG),
        ("delivery_wrong", deliveries.WRONG),
        ("half_altered", half_digests.UNCONFIRMED),
    ],
)
def test_each_comparison_finds_a_fault(examined: Proved, kind: str, query: str) -> None:
    """A comparison that Postgres no longer makes while a day is read is named by no finding."""
    words = set(WORD.findall(query))
    assert len(words) > 1
    said = " ".join(detail for (found, _), detail in examined.found.items() if found == kind)
    assert [word for word in sorted(words) if word not in said] == []


@pytest.mark.parametrize("whole", WHOLES, ids=[whole.name for whole in WHOLES])
def test_a_fault_of_a_whole_table_is_found(spark: SparkSession, copy: str, tmp_path: Path, whole: Whole) -> None:
    day = day_of(copy)
    with connect(copy) as connection:
        connection.execute("alter table outbox drop constraint outbox_pkey")
        for statement in whole.sql:
            assert connection.execute(statement).rowcount > 0, statement
    kinds = {kind for kind, _ in proved(spark, read(spark, copy, day, tmp_path), []).found}
    assert whole.finds <= kinds
    assert bool(kinds) == bool(whole.finds)


def differs_from_certificate(connection: Connection, fault: Fault) -> bool:
    """Return whether a fault changes what a certificate of the day covers; it is taken back."""
    pools = victims(connection)
    [one] = give_victims(connection, pools, [fault])
    with connection.transaction(force_rollback=True):
        connection.execute("alter table outbox drop constraint outbox_pkey")
        earlier = covered(connection)
        connection.execute(fault.sql, one.victim)
        return covered(connection) != earlier


def covered(connection: Connection) -> list[str]:
    """Return a digest for each table of the columns that a certificate covers."""
    found = []
    for table, columns in COLUMNS.items():
        names = ", ".join(f'"{name}"' for name, _ in columns)
        statement = (
            f"select md5(string_agg(r::text, '|' order by r::text)) as digest from (select {names} from {table}) r"
        )
        found.append(connection.execute(statement).fetchone()["digest"])  # type: ignore[index]
    return found


def test_the_page_lists_what_is_not_found() -> None:
    assert docs.table() in (ROOT / "docs/guarantees.md").read_text()
    assert all(bool(fault.why) == (fault.by != "tables") for fault in FAULTS)
    assert all(bool(whole.why) != bool(whole.finds) for whole in WHOLES)
