"""Small frames for the rules' tests: a day in which nothing is wrong, row by row, to be changed by each test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark import schemas
from spark.frames import Across, Frames
from spark.transforms.screen.row_groups import arrow_schema
from tests.spark.conftest import frame

DAY = date(2026, 11, 20)
SEEN_AT = datetime(2026, 11, 25, 3, 0, tzinfo=UTC)
# As migrating writes them down.
RULES = {
    "longest_backoff_s": 600.0,
    "longest_hold_s": 3600.0,
    "interval_s": 30.0,
    "max_checks": 15.0,
    "unanswered_park_s": 259_200.0,
}
Row = dict[str, Any]


def born(number: int) -> datetime:
    """When transaction `number` was born: one a second, from noon on."""
    return datetime(DAY.year, DAY.month, DAY.day, 12, tzinfo=UTC) + timedelta(seconds=number)


def id_of(number: int, at: datetime | None = None) -> str:
    """The UUIDv7 of transaction `number`."""
    digits = f"{int((at or born(number)).timestamp() * 1000):012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-{number:012x}"


def digest(text: str) -> bytes:
    """A body's digest."""
    return sha256(text.encode()).digest()


def message_id(number: int, position: int = 0) -> str:
    """The id of a message of transaction `number`."""
    return f"{id_of(number)}-{position}"


@dataclass
class Day:
    """The rows of a day, by frame. Subscription 1 takes `order`, and nothing else is there."""

    rows: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in schemas.FRAMES})
    seen_at: datetime = SEEN_AT
    extra: dict[str, Any] = field(default_factory=dict)

    def subscribe(self, number: int = 1, *topics: str, **columns: Any) -> None:
        """Add a subscription, made a day before, that has come to the end of the log."""
        row = {
            "subscription_id": number,
            "name": f"mailer-{number}",
            "topics": list(topics or ("order",)),
            "state": "active",
            "started_after": 0,
            "matches_since": born(-86_400),
            "created_at": born(-86_400),
        }
        lowest = columns.pop("lowest", 1_000_000)
        self.rows["subscription"].append(row | columns)
        self.rows["checkpoint"].append({"subscription_id": number, "shards": 1, "shard": 0, "offset": lowest})

    def half(self, number: int, position: int = 0, **columns: Any) -> None:
        """Add a half."""
        row = {
            "transaction_id": id_of(number),
            "position": position,
            "producer_group": "shop",
            "topic": "order",
            "body_digest": digest(f"{number}-{position}"),
            "born_at": born(number),
            "first_check_at": born(number + 6),
        }
        self.rows["half"].append(row | columns)

    def op(self, number: int, verdict: int = 1, **columns: Any) -> None:
        """Add a verdict."""
        row = {"transaction_id": id_of(number), "verdict": verdict, "source": 0, "decided_at": born(number + 1)}
        self.rows["op"].append(row | columns)

    def sent(self, number: int, position: int = 0, **columns: Any) -> None:
        """Add an outbox row, at an offset of its own in the order of time."""
        row = {
            "transaction_id": id_of(number),
            "position": position,
            "offset": number * 100 + position,
            "topic": "order",
            "committed_at": born(number + 1),
        }
        self.rows["outbox"].append(row | columns)

    def received(self, number: int, position: int = 0, subscription: int = 1, **columns: Any) -> None:
        """Add a receipt."""
        row = {
            "transaction_id": id_of(number),
            "position": position,
            "subscription_id": subscription,
            "offset": number * 100 + position,
            "outcome": "delivered",
            "attempts": 1,
            "first_at": born(number + 2),
            "duration_ms": 5,
            "status": 200,
            "digest": digest(f"{number}-{position}"),
            "settled_at": born(number + 2),
            "replay": 0,
        }
        self.rows["receipt"].append(row | columns)

    def committed(self, number: int, messages: int = 1, **columns: Any) -> None:
        """Add a committed transaction that subscription 1 received; `columns` go to half and outbox both."""
        self.op(number)
        for position in range(messages):
            self.half(number, position, **columns)
            self.sent(number, position, **{name: columns[name] for name in columns if name in ("topic", "key", "tag")})
            self.received(number, position)

    def rolled_back(self, number: int) -> None:
        """Add a transaction that was rolled back."""
        self.half(number)
        self.op(number, 2)

    def check_back(self, number: int, **columns: Any) -> None:
        """Add a row that says a transaction is in doubt."""
        row = {
            "transaction_id": id_of(number),
            "producer_group": "shop",
            "state": 1,
            "swept_at": born(number + 6),
            "asked": 0,
            "answered": 0,
            "unanswered": 0,
            "next_check_at": born(number + 36),
        }
        self.rows["check_back"].append(row | columns)

    def attempt(self, transaction: int, kind: str, **columns: Any) -> None:
        """Add an attempt."""
        rows = self.rows["attempt"]
        row = {
            "transaction_id": id_of(transaction),
            "attempt_id": len(rows) + 1,
            "kind": kind,
            "at": born(transaction + 10 + len(rows)),
            "outcome": kind,
        }
        rows.append(row | columns)

    def delivery(self, name: str, number: int, position: int = 0, subscription: int = 1, **columns: Any) -> None:
        """Add a row of delivery_retry, dead_letter or redelivery."""
        row = {
            "subscription_id": subscription,
            "replay": 0,
            "transaction_id": id_of(number),
            "position": position,
            "offset": number * 100 + position,
            "topic": "order",
            "attempts": 1,
            "due_at": self.seen_at,
            "reason": "exhausted",
            "died_at": born(number + 60),
            "what": "redelivered",
            "at": born(number + 90),
        }
        wanted = schemas.FRAMES[name].names
        self.rows[name].append({key: value for key, value in (row | columns).items() if key in wanted})

    def ledger(self, kind: str, *rows: Row) -> None:
        """Give a ledger: `producer_ledger` or `consumer_ledger`."""
        self.extra[kind] = [*self.extra.get(kind, []), *rows]

    def _history(self) -> list[Row]:
        """One version of each subscription that has none, from its row."""
        names = [name for name in schemas.SUBSCRIPTION_VERSION.names if name in schemas.SUBSCRIPTION.names]
        given = self.rows["subscription_version"]
        known = {row["subscription_id"] for row in given}
        made = [
            {name: row.get(name) for name in names}
            | {"version_id": row["subscription_id"], "at": row["matches_since"], "ordered": "none", "shards": 1}
            for row in self.rows["subscription"]
            if row["subscription_id"] not in known
        ]
        return [*given, *made]

    def of_day(self) -> dict[str, list[Row]]:
        """Return the rows by frame, with the history of the subscriptions."""
        return {**self.rows, "subscription_version": self._history()}

    def in_files(self, spark: SparkSession, directory: Path, *, counted: bool = False) -> Frames:
        """Return all of it as frames over files below `directory`, in several row groups.

        Half messages are in the order of their ids, as they are read; rows of other tables are in the order of the
        test. Ledgers and the like are as in `frames`.
        """
        f = self.frames(spark, counted=counted)
        files: dict[str, list[str]] = {}
        for name, rows in [*self.of_day().items(), ("archive", self.extra.get("archive", []))]:
            ordered = sorted(rows, key=lambda row: row["transaction_id"]) if name == "half" else rows
            schema = schemas.ARCHIVE if name == "archive" else schemas.FRAMES[name]
            cut = [{column: row.get(column) for column in schema.names} for row in ordered]
            file = directory / name / "part-0.parquet"
            file.parent.mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(cut, arrow_schema(schema)), file, row_group_size=50)
            files[name] = [str(file)]
        return replace(f, files=files)

    def frames(self, spark: SparkSession, *, counted: bool = True) -> Frames:
        """Return all of it as frames; if they are not `counted`, the rules take them for a large day's."""
        schema = {
            "producer_ledger": schemas.PRODUCER_LEDGER,
            "consumer_ledger": schemas.CONSUMER_LEDGER,
            "archive": schemas.ARCHIVE,
            "same_offset": schemas.SAME_OFFSET,
            **schemas.FOUND,
        }
        extra = {
            name: frame(spark, schema[name], value) if name in schema else value for name, value in self.extra.items()
        }
        of_day = self.of_day()
        made = {name: frame(spark, schemas.FRAMES[name], rows) for name, rows in of_day.items()}
        rows = {name: len(rows) for name, rows in of_day.items()} if counted else {}
        if "across" in extra:
            # This one is `eu`; another one has the ids without a row here.
            of = [{"transaction_id": one, "installations": names} for one, names in extra["across"].items()]
            shared = frame(spark, schemas.SHARED, of)
            extra["across"] = Across("eu", shared, shared.select("transaction_id"), complete=True, speaks=True)
        return Frames(day=DAY, seen_at=self.seen_at, rules=RULES, rows=rows, **made, **extra)


def plain_day() -> Day:
    """Return a day with subscription 1, ten committed transactions (1 to 10) and five rolled back (11 to 15)."""
    day = Day()
    day.subscribe()
    day.rows["producer_group"].append(
        {"name": "shop", "interval_s": 30, "max_checks": 15, "unanswered_park_s": 259_200, "on_exhausted": "rollback"}
    )
    for number in range(1, 11):
        day.committed(number)
    for number in range(11, 16):
        day.rolled_back(number)
    return day


def finding(kind: str, subject: str, **columns: Any) -> Mapping[str, Any]:
    """Return a row of FINDING, but for its detail."""
    return {"day": DAY, "kind": kind, "subject": subject} | columns


def of_message(kind: str, number: int, position: int = 0, **columns: Any) -> Mapping[str, Any]:
    """Return a finding about a message."""
    place = {"transaction_id": id_of(number), "position": position}
    return finding(kind, message_id(number, position), **place, **columns)


def expected(spark: SparkSession, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return findings as a frame, without their details."""
    return frame(spark, schemas.FINDING, [dict(row) | {"detail": "{}"} for row in rows]).drop("detail")
