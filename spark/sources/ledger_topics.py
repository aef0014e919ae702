"""Reads a ledger from a Kafka topic: `kafka://host:port,…/topic?option=value`; docs/ledgers.md has the format.

The driver reads the records with Kafka's client for Python, from the first retained one up to the end that the topic
has when the read begins, and writes them as Parquet of text columns. Spark's own source of Kafka needs jars that an
image without a network does not have.
"""

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from spark.errors import RunFailedError
from spark.sources.ledger_files import PASSWORD, LedgerError, Wanted

SCHEME = "kafka://"
OPTIONS = {"subscription", "since", "tls", "sasl", "user"}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
# The id of a message that Halfnote delivered, by CloudEvents' Kafka binding.
ID_HEADER = "ce_id"
ROWS_AT_ONCE = 50_000
POLL_MS = 500
# The read begins so long before the first day: an id, which says the day of a message, may be ahead of the commit by
# HALFNOTE_ID_SKEW_S (5 minutes by default), and processes have clocks of their own.
EARLIER = timedelta(hours=1)
# A broker that answers nothing for this time ends the read.
STALLED_S = 60.0


@dataclass(frozen=True)
class Topic:
    """A parsed SPEC. `subscription`: whose deliveries its records are; `since`: the first day of the messages."""

    bootstrap: str
    name: str
    subscription: str | None = None
    since: date | None = None
    tls: bool = False
    sasl: str | None = None
    user: str | None = None

    @property
    def shown(self) -> str:
        """The topic's URL without options."""
        return f"{SCHEME}{self.bootstrap}/{self.name}"


def parsed(spec: str) -> Topic:
    """Parse a SPEC. Raises LedgerError."""
    url = urlsplit(spec)
    name, options = unquote(url.path).strip("/"), dict(parse_qsl(url.query, keep_blank_values=True))
    shown = spec.partition("?")[0]
    if "@" in url.netloc:
        raise LedgerError(f"A ledger in Kafka has the user in ?user=… and the password in {PASSWORD}, not in the host.")
    if not url.netloc or not name or "/" in name:
        raise LedgerError(f"{shown} is no topic: write {SCHEME}host:port,host:port/topic")
    if unknown := sorted(options.keys() - OPTIONS):
        raise LedgerError(f"{shown}: there is no option {unknown[0]}; there are {', '.join(sorted(OPTIONS))}")
    sasl, tls = options.get("sasl"), options.get("tls", "false")
    if sasl is not None and sasl not in MECHANISMS:
        raise LedgerError(f"{shown}: sasl must be {', '.join(MECHANISMS)}")
    if tls not in ("true", "false"):
        raise LedgerError(f"{shown}: tls must be true or false")
    try:
        since = date.fromisoformat(options["since"]) if "since" in options else None
    except ValueError:
        raise LedgerError(f"{shown}: since must be a day like 2026-11-21") from None
    return Topic(url.netloc, name, options.get("subscription"), since, tls == "true", sasl, options.get("user"))


def read_topic(spark: SparkSession, spec: str, columns: Mapping[str, Wanted], directory: str) -> DataFrame:
    """Return the ledger in a topic as strings: `source`, `line` and `columns`, as ledger_files.read does.

    `directory`: where its rows are written; every executor must reach it. Raises LedgerError and RunFailedError.
    """
    topic = parsed(spec)
    try:
        from aiokafka.errors import KafkaError
    except ImportError:
        raise LedgerError("A ledger in Kafka needs aiokafka: pip install 'halfnote-server[spark,kafka]'") from None
    schema = pa.schema([(name, pa.string()) for name in ("source", "line", *columns)])
    Path(directory).mkdir(parents=True)
    try:
        with pq.ParquetWriter(f"{directory}/part-00000.parquet", schema, compression="zstd") as writer:
            asyncio.run(_copy(topic, columns, writer))
    except (KafkaError, OSError) as error:
        raise RunFailedError(f"{topic.shown} cannot be read: {str(error) or type(error).__name__}") from error
    return spark.read.parquet(directory)


async def _copy(topic: Topic, columns: Mapping[str, Wanted], writer: pq.ParquetWriter) -> None:
    rows: list[dict[str, str | None]] = []
    partitions = await _partitions(topic)
    async with _consumer(topic) as consumer:
        async for records in _records(topic, consumer, partitions):
            rows += [row_of(topic, record, columns) for record in records]
            if len(rows) >= ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, writer.schema))
                rows = []
    writer.write_table(pa.Table.from_pylist(rows, writer.schema))


def _reached(topic: Topic) -> dict[str, Any]:
    """Return the arguments of Kafka's clients that reach the brokers."""
    protocol = ("SASL_" if topic.sasl else "") + ("SSL" if topic.tls else "PLAINTEXT")
    reached: dict[str, Any] = {"bootstrap_servers": topic.bootstrap.split(","), "client_id": "halfnote-proof"}
    reached["security_protocol"] = protocol
    if topic.tls:
        reached["ssl_context"] = ssl.create_default_context()
    if topic.sasl:
        reached |= {"sasl_mechanism": topic.sasl, "sasl_plain_username": topic.user or ""}
        reached["sasl_plain_password"] = os.environ.get(PASSWORD, "")
    return reached


async def _partitions(topic: Topic) -> list[int]:
    """Return the numbers of a topic's partitions. Raises LedgerError if it does not exist."""
    from aiokafka.admin import AIOKafkaAdminClient

    admin = AIOKafkaAdminClient(**_reached(topic))
    await admin.start()
    try:
        # Of all topics: a question about one may create it.
        known = {one["topic"]: one["partitions"] for one in await admin.describe_topics()}
    finally:
        await admin.close()
    if topic.name not in known:
        raise LedgerError(f"{topic.shown} does not exist")
    return sorted(one["partition"] for one in known[topic.name])


@asynccontextmanager
async def _consumer(topic: Topic) -> AsyncIterator[Any]:
    """Yield a connected consumer of no group, so that nothing is written in Kafka."""
    from aiokafka import AIOKafkaConsumer

    consumer = AIOKafkaConsumer(
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        # Records of an aborted Kafka transaction are no messages.
        isolation_level="read_committed",
        **_reached(topic),
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def _records(topic: Topic, consumer: Any, numbers: Sequence[int]) -> AsyncIterator[Sequence[Any]]:
    """Yield the records of the partitions below the ends that they have now."""
    from aiokafka import TopicPartition

    partitions = [TopicPartition(topic.name, number) for number in numbers]
    ends = await consumer.end_offsets(partitions)
    firsts = await consumer.beginning_offsets(partitions)
    if topic.since is not None:
        since = datetime(topic.since.year, topic.since.month, topic.since.day, tzinfo=UTC) - EARLIER
        found = await consumer.offsets_for_times(dict.fromkeys(partitions, int(since.timestamp() * 1000)))
        firsts = {one: ends[one] if found[one] is None else found[one].offset for one in partitions}
    left = {one for one in partitions if firsts[one] < ends[one]}
    consumer.assign(sorted(left))
    for one in left:
        consumer.seek(one, firsts[one])
    positions: dict[Any, int] = {}
    moved = time.monotonic()
    while left:
        for one, records in (await consumer.getmany(*left, timeout_ms=POLL_MS)).items():
            yield [record for record in records if record.offset < ends[one]]
        # A position also passes the marks of Kafka's transactions, which are no records.
        reached = {one: await consumer.position(one) for one in left}
        if reached != positions:
            positions, moved = reached, time.monotonic()
        elif time.monotonic() - moved > STALLED_S:
            raise RunFailedError(f"{topic.shown} gave nothing more for {STALLED_S:g} s, and it has more records.")
        left = {one for one in left if reached[one] < ends[one]}


def row_of(topic: Topic, record: Any, columns: Mapping[str, Wanted]) -> dict[str, str | None]:
    """Return a record as a row: a message that Halfnote delivered, or a JSON object with the ledger's columns."""
    row: dict[str, str | None] = {"source": f"{topic.shown}/{record.partition}", "line": None}
    row |= {name: wanted.default for name, wanted in columns.items()}
    if "subscription" in columns:
        row["subscription"] = topic.subscription
    delivered = next((value for name, value in record.headers if name == ID_HEADER), None)
    if delivered is not None and "message_id" in columns:
        return row | {"message_id": delivered.decode("utf-8", "replace")}
    found = _object(record.value)
    if found is None:
        text = (record.value or b"").decode("utf-8", "replace")
        return row | {"line": f"offset {record.offset}: {text}"}
    return row | dict(_texts(found, columns))


def _object(value: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(value or b"")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _texts(found: Mapping[str, Any], columns: Mapping[str, Wanted]) -> Iterator[tuple[str, str | None]]:
    for name, value in found.items():
        if name.lower() in columns and value is not None:
            yield name.lower(), value if isinstance(value, str) else json.dumps(value)
