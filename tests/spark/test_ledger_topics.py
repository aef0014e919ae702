"""Ledgers in topics of a real Kafka: which record is which row, up to which offset, and what cannot be read."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession

from spark.errors import RunFailedError
from spark.sources.ledger_topics import Topic, parsed
from spark.sources.ledgers import LedgerError, consumer_ledger, producer_ledger
from tests.destinations.test_kafka import PARTITIONS, create, destination
from tests.spark.days import days_ago, fill_day, prove, rows
from tests.support import brokers
from tests.support.brokers import Server
from tests.support.deliveries import NOW, delivery
from tests.support.requirements import absent

ID = "019a0000-0000-7000-8000-{:012x}"


@pytest.fixture(scope="module")
def server() -> Server:
    if why := brokers.missing("kafka"):
        absent(why, "DEPS")
    return brokers.kafka()


@pytest.fixture
def topic(server: Server) -> str:
    name = f"ledger-{uuid4().hex}"
    asyncio.run(create(server, name))
    return name


def send(server: Server, work: Callable[[AIOKafkaProducer], Awaitable[Any]], **options: Any) -> None:
    async def run() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=server.url, **options)
        await producer.start()
        try:
            await work(producer)
        finally:
            await producer.stop()

    asyncio.run(run())


def spec(server: Server, topic: str, **options: str) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"kafka://{server.url}/{topic}" + (f"?{query}" if query else "")


def test_a_spec_is_parsed() -> None:
    given = "kafka://a:9092,b/orders?subscription=points&since=2026-11-20&tls=true&sasl=SCRAM-SHA-256&user=auditor"
    of = datetime(2026, 11, 20, tzinfo=UTC).date()
    assert parsed(given) == Topic("a:9092,b", "orders", "points", of, True, "SCRAM-SHA-256", "auditor")
    assert parsed("kafka://a/o") == Topic("a", "o")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("kafka://a:9092", "is no topic"),
        ("kafka://a/b/c", "is no topic"),
        ("kafka://me:secret@a/b", "HALFNOTE_LEDGER_PASSWORD"),
        ("kafka://a/b?group=x", "there is no option group"),
        ("kafka://a/b?since=yesterday", "since must be a day"),
        ("kafka://a/b?sasl=GSSAPI", "sasl must be PLAIN"),
        ("kafka://a/b?tls=1", "tls must be true or false"),
    ],
)
def test_a_wrong_spec_is_wrong_usage(given: str, said: str) -> None:
    with pytest.raises(LedgerError, match=said) as refused:
        parsed(given)
    assert "secret" not in str(refused.value)


def test_what_halfnote_delivered_is_a_consumer_ledger(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    sent = [delivery(message_id=f"{ID.format(number)}-0", key=str(number)) for number in range(3)]

    async def deliver() -> None:
        async with destination(server, topic=topic) as kafka:
            await kafka.deliver(sent, NOW)
            # A message that was delivered twice.
            await kafka.deliver(sent[:1], NOW)

    asyncio.run(deliver())
    read = consumer_ledger(spark, spec(server, topic, subscription="points"), str(tmp_path / "staging"))
    found = {(row.message_id, row.times_seen, row.subscription) for row in read.rows.collect()}
    assert found == {(sent[0].message_id, 2, "points"), *((one.message_id, 1, "points") for one in sent[1:])}
    assert read.counts == {"read": 4, "kept": 3, "merged": 1, "set_aside": {}}


def test_json_records_are_rows_and_others_are_set_aside(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    async def write(producer: AIOKafkaProducer) -> None:
        values = [
            {"transaction_id": ID.format(1), "verdict": "commit", "order": 7},
            {"Transaction_ID": ID.format(2), "verdict": False},
            {"transaction_id": ID.format(3)},
            {"transaction_id": ID.format(4), "verdict": 1},
        ]
        for place, value in enumerate(values):
            await producer.send_and_wait(topic, json.dumps(value).encode(), partition=place % PARTITIONS)
        for value in (b"no JSON", b"[1]", None):
            await producer.send_and_wait(topic, value, b"order-1030", partition=0)

    send(server, write)
    read = producer_ledger(spark, spec(server, topic), str(tmp_path / "staging"))
    assert {(row.transaction_id, row.verdict) for row in read.rows.collect()} == {
        (ID.format(1), "commit"),
        (ID.format(2), "rollback"),
    }
    assert read.counts["set_aside"] == {"unknown_verdict": 2, "malformed_line": 3}
    aside = {(row.reason, row.source, row.given) for row in read.set_aside.collect()}
    assert ("malformed_line", f"kafka://{server.url}/{topic}/0", "offset 1: no JSON") in aside


def test_what_kafkas_transactions_aborted_is_not_read_and_their_marks_do_not_stop_it(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    def value(number: int) -> bytes:
        return json.dumps({"message_id": f"{ID.format(number)}-0"}).encode()

    async def write(producer: AIOKafkaProducer) -> None:
        async with producer.transaction():
            await producer.send(topic, value(1), partition=0)
        await producer.begin_transaction()
        await producer.send(topic, value(2), partition=0)
        await producer.send_and_wait(topic, value(3), partition=1)
        await producer.abort_transaction()

    send(server, write, transactional_id=uuid4().hex)
    read = consumer_ledger(spark, spec(server, topic), str(tmp_path / "staging"))
    assert [row.message_id for row in read.rows.collect()] == [f"{ID.format(1)}-0"]


def test_since_leaves_out_earlier_records(spark: SparkSession, server: Server, topic: str, tmp_path: Path) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)

    async def write(producer: AIOKafkaProducer) -> None:
        # The id of a message may be of the day after its commit, by an hour at most.
        earliest = today - timedelta(hours=1)
        for number, at in enumerate((earliest - timedelta(seconds=1), earliest, today)):
            value = json.dumps({"message_id": f"{ID.format(number)}-0"}).encode()
            await producer.send_and_wait(topic, value, partition=0, timestamp_ms=int(at.timestamp() * 1000))

    send(server, write)
    read = consumer_ledger(spark, spec(server, topic, since=str(today.date())), str(tmp_path / "staging"))
    assert sorted(row.message_id for row in read.rows.collect()) == [f"{ID.format(number)}-0" for number in (1, 2)]


def test_an_empty_topic_must_be_declared_and_a_missing_one_is_named(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    with pytest.raises(LedgerError, match=f"{topic} has no rows"):
        consumer_ledger(spark, spec(server, topic), str(tmp_path / "staging"))
    assert consumer_ledger(spark, spec(server, topic), str(tmp_path / "again"), complete=True).counts["read"] == 0
    with pytest.raises(LedgerError, match="/nobody does not exist"):
        consumer_ledger(spark, spec(server, "nobody"), str(tmp_path / "missing"))
    [closed] = brokers.free_ports(1)
    with pytest.raises(RunFailedError, match="cannot be read"):
        consumer_ledger(spark, f"kafka://127.0.0.1:{closed}/orders", str(tmp_path / "unreachable"))


@pytest.mark.usefixtures("spark")
def test_a_proof_compares_with_a_topic(dsn: str, server: Server, topic: str) -> None:
    day = days_ago(1)
    fill_day(dsn, day, 20)
    ids = [str(row["transaction_id"]) for row in rows(dsn, "select transaction_id from op order by 1")]

    async def write(producer: AIOKafkaProducer) -> None:
        for one in [*ids[1:], ids[5]]:
            await producer.send(topic, b"{}", headers=[("ce_id", f"{one}-0".encode())])
        await producer.flush()

    send(server, write)
    ledger = spec(server, topic, subscription="billing")
    assert prove(dsn, "--day", day, "--consumer-ledger", ledger, "--consumer-ledger-complete") == 3
    found = {(row["kind"], row["subject"]) for row in rows(dsn, "select kind, subject from finding")}
    assert found == {("never_consumed", f"{ids[0]}-0"), ("consumed_twice", f"{ids[5]}-0")}
