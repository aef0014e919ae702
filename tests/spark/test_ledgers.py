"""Ledgers from files and from a real database: rows that are kept, rows that are set aside, input that is refused."""

import asyncio
import csv
import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.testing import assertDataFrameEqual

from spark import schemas
from spark.errors import RunFailedError
from spark.sources.ledger_files import PASSWORD
from spark.sources.ledgers import Ledger, LedgerError, consumer_ledger, producer_ledger, write_set_aside


def transaction(number: int) -> str:
    return f"019a0000-0000-7000-8000-{number:012x}"


def message(number: int, position: int = 0) -> str:
    return f"{transaction(number)}-{position}"


def write_csv(path: Path, *lines: str, names: str = "transaction_id,verdict") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([names, *lines]) + "\n")
    return str(path)


def write_parquet(path: Path, **columns: pa.Array) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def rows(found: Ledger) -> list[tuple[Any, ...]]:
    """Without the columns that may be missing."""
    kept = [name for name in found.rows.columns if name not in ("end_decided_at", "end_reason", "answered")]
    return sorted(map(tuple, found.rows.select(*kept).collect()), key=str)


def aside(found: Ledger) -> list[tuple[str, str]]:
    return sorted((row.reason, row.given) for row in found.set_aside.collect())


@pytest.fixture
def staging(tmp_path: Path) -> str:
    return str(tmp_path / "staging")


def test_csv_is_read_by_the_names_of_its_columns(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_csv(
        tmp_path / "shop.csv",
        f'"a ""b"", c",COMMIT,{transaction(1).upper()}',
        f"x, rolled_back , {transaction(2)} ",
        f"x,t,{transaction(3).replace('-', '')}",
        f"x,false,{transaction(4)}",
        names="note,Verdict,transaction_id",
    )
    found = producer_ledger(spark, place, staging)
    expected = [
        (transaction(1), "commit"),
        (transaction(2), "rollback"),
        (transaction(3), "commit"),
        (transaction(4), "rollback"),
    ]
    assert rows(found) == expected
    assert found.counts == {"read": 4, "kept": 4, "merged": 0, "set_aside": {}}
    wanted = [(*row, None, None) for row in expected]
    assertDataFrameEqual(found.rows, spark.createDataFrame(wanted, schemas.PRODUCER_LEDGER), ignoreNullable=True)


@pytest.mark.slow
def test_a_program_s_byte_order_mark_is_no_part_of_a_name(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    (tmp_path / "shop.csv").write_bytes(f"\ufefftransaction_id,verdict\r\n{transaction(1)},commit\r\n".encode())
    assert rows(producer_ledger(spark, str(tmp_path / "shop.csv"), staging)) == [(transaction(1), "commit")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["string", "bool", "uuid"])
def test_parquet_has_words_or_booleans_and_ids_as_text_or_bytes(
    kind: str, spark: SparkSession, tmp_path: Path, staging: str
) -> None:
    ids = [transaction(1), transaction(2)]
    columns = {
        "string": (pa.array(ids), pa.array(["committed", "rollback"])),
        "bool": (pa.array(ids), pa.array([True, False])),
        "uuid": (pa.array([bytes.fromhex(one.replace("-", "")) for one in ids]), pa.array([True, False])),
    }[kind]
    place = write_parquet(tmp_path / "shop.parquet", transaction_id=columns[0], verdict=columns[1])
    found = producer_ledger(spark, place, staging)
    assert rows(found) == [(transaction(1), "commit"), (transaction(2), "rollback")]


def test_a_directory_may_hold_both_in_any_layout(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = tmp_path / "ledger"
    write_csv(place / "a.csv", f"{transaction(1)},commit")
    write_csv(place / "b.csv", f"rollback,{transaction(2)}", names="verdict,transaction_id")
    with gzip.open(place / "c.csv.gz", "wt") as packed:
        packed.write(f"transaction_id,verdict\n{transaction(3)},commit\n")
    write_parquet(place / "day=1" / "d.parquet", transaction_id=pa.array([transaction(4)]), verdict=pa.array([True]))
    write_parquet(place / "day=1" / "e.parquet", transaction_id=pa.array([transaction(5)]), verdict=pa.array(["f"]))
    (place / "_SUCCESS").touch()
    (place / "_begun.csv").write_text("half a")
    (place / "README").write_text("not rows")
    verdicts = ["commit", "rollback", "commit", "commit", "rollback"]
    assert rows(producer_ledger(spark, str(place), staging)) == [
        (transaction(number), verdict) for number, verdict in enumerate(verdicts, 1)
    ]


def test_bad_rows_are_counted_by_reason_and_set_aside(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_csv(
        tmp_path / "shop.csv",
        f"{transaction(1)},commit",
        "1030,commit",
        ",commit",
        "019a0000-0000-4000-8000-000000000001,commit",
        f"{transaction(2)},maybe",
        f"{transaction(3)},",
        f"{transaction(4)},commit,more",
        transaction(5),
    )
    found = producer_ledger(spark, place, staging)
    assert rows(found) == [(transaction(1), "commit")]
    by_reason = {"bad_transaction_id": 3, "unknown_verdict": 2, "malformed_line": 2}
    assert found.counts == {"read": 8, "kept": 1, "merged": 0, "set_aside": by_reason}
    assert {row.source for row in found.set_aside.collect()} == {place}
    assert aside(found) == [
        ("bad_transaction_id", '{"transaction_id":"019a0000-0000-4000-8000-000000000001","verdict":"commit"}'),
        ("bad_transaction_id", '{"transaction_id":"1030","verdict":"commit"}'),
        ("bad_transaction_id", '{"verdict":"commit"}'),
        ("malformed_line", f"{transaction(4)},commit,more"),
        ("malformed_line", transaction(5)),
        ("unknown_verdict", json.dumps({"transaction_id": transaction(2), "verdict": "maybe"}, separators=(",", ":"))),
        ("unknown_verdict", json.dumps({"transaction_id": transaction(3)}, separators=(",", ":"))),
    ]
    write_set_aside(found, str(tmp_path / "aside"))
    [written] = (tmp_path / "aside").glob("*.csv")
    with written.open(newline="") as lines:
        assert sorted((row["reason"], row["given"]) for row in csv.DictReader(lines)) == aside(found)


@pytest.mark.slow
def test_nothing_is_written_where_nothing_was_set_aside(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    found = producer_ledger(spark, write_csv(tmp_path / "shop.csv", f"{transaction(1)},commit"), staging)
    write_set_aside(found, str(tmp_path / "aside"))
    assert not (tmp_path / "aside").exists()


def test_rows_that_agree_are_merged_and_others_set_aside(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = tmp_path / "ledger"
    write_csv(place / "a.csv", f"{transaction(1)},commit", f"{transaction(2)},commit", f"{transaction(3)},rollback")
    write_csv(
        place / "b.csv", f"{transaction(1).upper()},committed", f"{transaction(2)},rollback", f"{transaction(2)},t"
    )
    found = producer_ledger(spark, str(place), staging)
    assert rows(found) == [(transaction(1), "commit"), (transaction(3), "rollback")]
    assert found.counts == {"read": 6, "kept": 2, "merged": 1, "set_aside": {"contradictory": 3}}
    assert [(reason, json.loads(given)) for reason, given in aside(found)] == [
        ("contradictory", {"transaction_id": transaction(2), "verdict": verdict})
        for verdict in ("commit", "rollback", "t")
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_missing_column_is_named_with_its_file(
    suffix: str, spark: SparkSession, tmp_path: Path, staging: str
) -> None:
    # The other file has the column; Spark alone would read nulls from this one.
    write_csv(tmp_path / "ledger" / "a.csv", f"{transaction(1)},commit")
    place = tmp_path / "ledger" / f"b.{suffix}"
    if suffix == "csv":
        write_csv(place, f"{transaction(1)},commit", names="id,verdict")
    else:
        write_parquet(place, id=pa.array([transaction(1)]), verdict=pa.array(["commit"]))
    with pytest.raises(LedgerError) as refused:
        producer_ledger(spark, str(tmp_path / "ledger"), staging)
    assert str(refused.value) == f"{place} has no column transaction_id; it has id, verdict"


def test_a_wrong_type_is_named_with_its_column_and_file(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_parquet(
        tmp_path / "shop.parquet", transaction_id=pa.array([transaction(1)]), verdict=pa.array([1], pa.int32())
    )
    with pytest.raises(LedgerError) as refused:
        producer_ledger(spark, place, staging)
    assert str(refused.value) == f"{place}: column verdict is int, but must be string or boolean"


def test_files_that_are_none_are_refused(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "nothing.csv").touch()
    (tmp_path / "ledger.txt").write_text("transaction_id,verdict\n")
    for name, said in (
        ("missing.csv", "missing.csv does not exist"),
        ("empty", "has no .parquet, .csv or .csv.gz"),
        ("ledger.txt", "has no .parquet, .csv or .csv.gz"),
        ("torn.parquet", "torn.parquet cannot be read"),
        ("nothing.csv", "nothing.csv has no column transaction_id; it has none"),
    ):
        with pytest.raises(LedgerError, match=said):
            producer_ledger(spark, str(tmp_path / name), staging)


@pytest.mark.slow
def test_a_ledger_of_which_nothing_can_be_used_is_refused(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_csv(tmp_path / "shop.csv", "1,commit", "2,commit")
    with pytest.raises(LedgerError, match=r"shop.csv: none of its 2 rows can be used \(bad_transaction_id 2\)"):
        producer_ledger(spark, place, staging)


def test_a_consumer_s_rows_are_added_up_and_bad_ones_set_aside(
    spark: SparkSession, tmp_path: Path, staging: str
) -> None:
    place = write_csv(
        tmp_path / "seen.csv",
        f"{message(1)},1,points",
        f"{message(1)},2,points",
        f"{message(1)},1,mail",
        f"{message(2, 31).upper()},0,",
        f"{transaction(1)},1,",
        f"{transaction(1)}-01,1,",
        f"{message(2)},-1,",
        f"{message(3)},often,",
        f"{message(4)},1.5,",
        f"{message(5)},,",
        f"{message(6)},99999999999999999999,",
        names="message_id,times_seen,subscription",
    )
    found = consumer_ledger(spark, place, staging)
    expected = [(message(1), 1, "mail"), (message(1), 3, "points"), (message(2, 31), 0, None)]
    assert rows(found) == expected
    by_reason = {"bad_message_id": 2, "bad_times_seen": 5}
    assert found.counts == {"read": 11, "kept": 3, "merged": 1, "set_aside": by_reason}
    wanted = [(*row, []) for row in expected]
    assertDataFrameEqual(found.rows, spark.createDataFrame(wanted, schemas.CONSUMER_LEDGER), ignoreNullable=True)


@pytest.mark.slow
def test_a_consumer_s_row_a_sighting_needs_no_number(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    ids = pa.array([message(1), message(2), message(1)])
    found = consumer_ledger(spark, write_parquet(tmp_path / "seen.parquet", message_id=ids), staging)
    assert rows(found) == [(message(1), 2, None), (message(2), 1, None)]


def test_a_consumer_s_counts_are_whole_numbers(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_parquet(tmp_path / "seen.parquet", message_id=pa.array([message(1)]), times_seen=pa.array([1.0]))
    with pytest.raises(LedgerError, match=r"seen\.parquet: column times_seen is double"):
        consumer_ledger(spark, place, staging)


def test_what_was_said_and_answered_at_an_end_is_read(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_csv(
        tmp_path / "shop.csv",
        f"{transaction(1)},rollback,2026-11-21T08:00:00.25Z,sold out",
        f"{transaction(2)},commit,2026-11-21 09:00:00+01:00,",
        f"{transaction(3)},commit,,",
        f"{transaction(4)},commit,yesterday,",
        f"{transaction(5)},rollback,,late",
        f"{transaction(5)},rollback,,sold out",
        f"{transaction(6)},rollback,2026-11-21T08:00:00Z,",
        f"{transaction(6)},rollback,2026-11-21T08:00:01Z,",
        names="transaction_id,verdict,end_decided_at,end_reason",
    )
    found = producer_ledger(spark, place, staging)
    at = datetime(2026, 11, 21, 8, tzinfo=UTC)
    expected = [
        (transaction(1), "rollback", at + timedelta(milliseconds=250), "sold out"),
        (transaction(2), "commit", at, ""),
        (transaction(3), "commit", None, ""),
    ]
    assertDataFrameEqual(found.rows, spark.createDataFrame(expected, schemas.PRODUCER_LEDGER), ignoreNullable=True)
    assert found.counts["set_aside"] == {"bad_end_decided_at": 1, "contradictory": 4}


def test_the_statuses_that_a_consumer_answered_are_read(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    place = write_csv(
        tmp_path / "points.csv",
        f"{message(1)},503",
        f"{message(1)},200",
        f"{message(1)},",
        f"{message(2)},",
        f"{message(3)},done",
        f"{message(4)},600",
        names="message_id,answered_status",
    )
    found = consumer_ledger(spark, place, staging)
    expected = [(message(1), 3, None, [200, 503]), (message(2), 1, None, [])]
    assertDataFrameEqual(found.rows, spark.createDataFrame(expected, schemas.CONSUMER_LEDGER), ignoreNullable=True)
    assert found.counts["set_aside"] == {"bad_answered_status": 2}


@pytest.fixture
def ledger_url(dsn: str) -> str:
    """A producer's own database, by JDBC and with the password elsewhere."""
    made = "create table orders (transaction_id uuid, paid boolean, note varchar(9)); insert into orders values "
    values = [f"('{transaction(1)}', true, 'x')", f"('{transaction(2)}', false, null)", "(null, true, null)"]

    async def fill() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(made + ", ".join(values))
        await connection.execute("create view ledger as select transaction_id, paid as verdict from orders")
        await connection.close()

    asyncio.run(fill())
    parts = urlsplit(dsn)
    return f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}?user={parts.username}"


@pytest.mark.parametrize(
    "what",
    ["ledger", pytest.param("select transaction_id, paid as verdict, note from orders;", marks=pytest.mark.slow)],
)
def test_a_database_is_read_by_table_or_query(
    what: str, ledger_url: str, dsn: str, spark: SparkSession, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, urlsplit(dsn).password or "")
    found = producer_ledger(spark, f"{ledger_url}#{what}", staging)
    assert rows(found) == [(transaction(1), "commit"), (transaction(2), "rollback")]
    assert found.counts == {"read": 3, "kept": 2, "merged": 0, "set_aside": {"bad_transaction_id": 1}}
    assert [row.source for row in found.set_aside.collect()] == [f"{ledger_url.partition('?')[0]}#{what.rstrip(';')}"]


@pytest.mark.slow
def test_a_database_is_asked_once(
    ledger_url: str, dsn: str, spark: SparkSession, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, urlsplit(dsn).password or "")
    found = producer_ledger(spark, f"{ledger_url}#ledger", staging)

    async def empty() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute("delete from orders")
        await connection.close()

    asyncio.run(empty())
    assert (len(rows(found)), len(aside(found))) == (2, 1)


def test_what_a_database_does_not_have_is_wrong_usage(
    ledger_url: str, dsn: str, spark: SparkSession, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, urlsplit(dsn).password or "")
    for what, said in (
        ("#nowhere", "nowhere"),
        ("#select transaction_id from orders", "has no column verdict; it has transaction_id"),
        ("#select transaction_id, 1 as verdict from orders", "column verdict is int, but must be string or boolean"),
        ("", "add #table or #select"),
        ("&password=secret#ledger", "set HALFNOTE_LEDGER_PASSWORD instead"),
    ):
        with pytest.raises(LedgerError, match=said) as refused:
            producer_ledger(spark, ledger_url + what, staging)
        assert "secret" not in str(refused.value)


def test_a_database_that_does_not_answer_fails_the_run(spark: SparkSession, staging: str) -> None:
    with pytest.raises(RunFailedError, match=r"jdbc:postgresql://127\.0\.0\.1:9/shop: "):
        producer_ledger(spark, "jdbc:postgresql://127.0.0.1:9/shop?user=me#ledger", staging)
