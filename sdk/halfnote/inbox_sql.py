"""The inbox's statements in each dialect. The primary key makes a message unique."""

from dataclasses import dataclass

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
_COLUMNS = "consumer, message_id, replay, subscription"
# How long a message waits for another run of itself. One that hangs, or whose lost connection the database has not
# noticed, must not keep a thread or a connection for each new delivery.
WAIT_S = 3.0


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

    def receiving(self, message_id: str, replay: str, subscription: str | None) -> Script[bool]:
        """Write a message's row; return whether it is the first. Waits for WAIT_S for another run of the message."""
        return limited(self.dialect, WAIT_S, self._inserting(message_id, replay, subscription))

    def _inserting(self, message_id: str, replay: str, subscription: str | None) -> Script[bool]:
        sql = _INSERT[self.dialect].format(table=self.table, columns=_COLUMNS, values="{0}, {1}, {2}, {3}")
        return (yield Statement(sql, (self.consumer, message_id, replay, subscription))).count == 1

    def standing(self, message_id: str, replay: str) -> Script[bool]:
        """Return whether a message's row exists, in the database transaction that wrote it."""
        sql = f"select 1 from {self.table} where consumer = {{0}} and message_id = {{1}} and replay = {{2}}"  # noqa: S608
        return len((yield Statement(sql, (self.consumer, message_id, replay))).rows) == 1

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
