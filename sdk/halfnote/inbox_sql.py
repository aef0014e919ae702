"""The inbox's statements in each dialect. The primary key makes a message unique."""

import secrets
from dataclasses import dataclass, field

from halfnote.barrier_sql import is_table_name
from halfnote.databases.base import Dialect, Script, Statement
from halfnote.lock_limit import limited

_CREATE = {
    "postgresql": """create table if not exists {table} (
  consumer varchar(255) not null,
  message_id varchar(64) not null,
  replay varchar(64) not null default '',
  subscription varchar(255),
  at timestamptz not null default now(),
  primary key (consumer, message_id, replay)
)""",
    "mysql": """create table if not exists {table} (
  consumer varchar(255) character set utf8mb4 collate utf8mb4_bin not null,
  message_id varchar(64) character set ascii collate ascii_bin not null,
  replay varchar(64) character set ascii collate ascii_bin not null default '',
  subscription varchar(255) character set utf8mb4 collate utf8mb4_bin,
  at timestamp(6) not null default current_timestamp(6),
  primary key (consumer, message_id, replay)
) engine = InnoDB""",
    "sqlite": """create table if not exists {table} (
  consumer text not null,
  message_id text not null,
  replay text not null default '',
  subscription text,
  at text not null default current_timestamp,
  primary key (consumer, message_id, replay)
)""",
}
# Each statement waits until another database transaction with the same message is over.
_INSERT = {
    "postgresql": "insert into {table} ({columns}) values ({values}) on conflict do nothing",
    "mysql": "insert ignore into {table} ({columns}) values ({values})",
    "sqlite": "insert or ignore into {table} ({columns}) values ({values})",
}
_COLUMNS = "consumer, message_id, replay, subscription, at"
# The time of a row, to the second by the database's clock, with the microseconds of its run; and these read again.
_AT = {
    "postgresql": "date_trunc('second', now()) + cast({4} as integer) * interval '1 microsecond'",
    "mysql": "current_timestamp(0) + interval {4} microsecond",
    "sqlite": "current_timestamp || '.' || substr('00000' || {4}, -6)",
}
_MICROSECOND = {
    "postgresql": "mod(cast(extract(microseconds from at) as integer), 1000000)",
    "mysql": "microsecond(at)",
    "sqlite": "cast(substr(at, 21) as integer)",
}
# How long a message waits for another run of itself. One that hangs, or whose lost connection the database has not
# noticed, must not keep a thread or a connection for each new delivery.
WAIT_S = 3.0


@dataclass(frozen=True)
class InboxRow:
    """A message's row, as one run of its handler writes it."""

    message_id: str
    replay: str
    subscription: str | None
    # Tells the row from that of another run, which takes the message if this run's database transaction is undone.
    # Random, because two runs can begin together; a column of its own would need a change of each consumer's table.
    microsecond: int = field(default_factory=lambda: secrets.randbelow(1_000_000))


@dataclass(frozen=True)
class InboxSql:
    """The scripts of one table for one consumer."""

    dialect: Dialect
    table: str
    consumer: str

    def __post_init__(self) -> None:
        if not is_table_name(self.table):
            raise ValueError(f"{self.table!r} is not a table name")

    @property
    def create(self) -> str:
        """The table's definition."""
        return _CREATE[self.dialect].format(table=self.table)

    def creating(self) -> Script[None]:
        """Make the table."""
        yield Statement(self.create)

    def receiving(self, row: InboxRow) -> Script[bool]:
        """Write a message's row; return whether it is the first. Waits for WAIT_S for another run of the message."""
        return limited(self.dialect, WAIT_S, self._inserting(row))

    def _inserting(self, row: InboxRow) -> Script[bool]:
        values = f"{{0}}, {{1}}, {{2}}, {{3}}, {_AT[self.dialect]}"
        sql = _INSERT[self.dialect].format(table=self.table, columns=_COLUMNS, values=values)
        written = (self.consumer, row.message_id, row.replay, row.subscription, row.microsecond)
        return (yield Statement(sql, written)).count == 1

    def standing(self, row: InboxRow) -> Script[bool]:
        """Return whether the row exists and is that of this run, before the commit.

        PostgreSQL commits nothing after a failed statement and reports success. MySQL rolls everything back at a
        deadlock and goes on in another database transaction, and a duplicate can take the message meanwhile.
        """
        came = yield Statement(
            f"select {_MICROSECOND[self.dialect]} from {self.table} "  # noqa: S608 - a checked name
            "where consumer = {0} and message_id = {1} and replay = {2}",
            (self.consumer, row.message_id, row.replay),
        )
        return [found[0] for found in came.rows] == [row.microsecond]

    def purging(self, before: str) -> Script[int]:
        """Delete what is of transactions older than the id `before`."""
        sql = f"delete from {self.table} where consumer = {{0}} and message_id < {{1}}"  # noqa: S608 - a checked name
        return (yield Statement(sql, (self.consumer, before))).count

    def exporting(self, after: str, before: str, limit: int) -> Script[list[tuple[str, str | None]]]:
        """Read a page of messages and the subscriptions that delivered them, in order of their ids, each once."""
        came = yield Statement(
            f"select message_id, min(subscription) from {self.table} where consumer = {{0}} "  # noqa: S608 - as above
            f"and message_id > {{1}} and message_id < {{2}} group by message_id order by message_id limit {int(limit)}",
            (self.consumer, after, before),
        )
        return [(row[0], row[1]) for row in came.rows]
