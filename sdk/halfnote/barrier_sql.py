"""The barrier's statements in each dialect. The primary key makes the checker wait for the local work."""

import re
from dataclasses import dataclass

from halfnote.databases.base import Dialect, Script, Statement
from halfnote.lock_limit import limited
from halfnote.verdicts import Verdict

LOCAL, REFUSED = "local", "rollback"

is_table_name = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?").fullmatch

_CREATE = {
    "postgresql": """create table if not exists {table} (
  transaction_id uuid primary key,
  reason varchar(8) not null check (reason in ('local', 'rollback')),
  at timestamptz not null default now()
)""",
    "mysql": """create table if not exists {table} (
  transaction_id char(36) character set ascii collate ascii_bin primary key,
  reason varchar(8) not null check (reason in ('local', 'rollback')),
  at timestamp(6) not null default current_timestamp(6)
) engine = InnoDB""",
    "sqlite": """create table if not exists {table} (
  transaction_id text primary key,
  reason text not null check (reason in ('local', 'rollback')),
  at text not null default current_timestamp
)""",
}
# Each waits for the end of a database transaction that holds the same key, and inserts only if the key is free.
_INSERT = {
    "postgresql": "insert into {table} (transaction_id, reason) values ({id}, '{reason}') on conflict do nothing",
    "mysql": "insert ignore into {table} (transaction_id, reason) values ({id}, '{reason}')",
    "sqlite": "insert or ignore into {table} (transaction_id, reason) values ({id}, '{reason}')",
}


@dataclass(frozen=True)
class BarrierSql:
    """The scripts of one table. `wait_s`: how long a check waits for local work that is under way."""

    dialect: Dialect
    table: str
    wait_s: float

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

    def entering(self, transaction_id: str) -> Script[bool]:
        """Write the local transaction's row; return whether it is the first of its transaction."""
        return (yield self._insert(transaction_id, LOCAL)).count == 1

    def recorded(self, transaction_id: str) -> Script[Verdict | None]:
        """Return the outcome that the row shows, or None without one."""
        came = yield self._read(transaction_id)
        return None if not came.rows else Verdict.COMMIT if came.rows[0][0] == LOCAL else Verdict.ROLLBACK

    def dropping(self, transaction_id: str) -> Script[None]:
        """Let the transaction's row say that its messages are dropped, in the database transaction that wrote it."""
        sql = f"update {self.table} set reason = '{REFUSED}' where transaction_id = {self._id}"  # noqa: S608
        yield Statement(sql, (transaction_id,))

    def standing(self, transaction_id: str) -> Script[bool]:
        """Return whether the transaction has its row, in the database transaction that may have written it.

        After a rollback the row may be that of a check.
        """
        return (yield from self.recorded(transaction_id)) is Verdict.COMMIT

    def checking(self, transaction_id: str, *, refuse: bool) -> Script[Verdict]:
        """Return the outcome of the local transaction; with `refuse`, a transaction without a row never gets one.

        Runs in its own database transaction, whose commit must return before the verdict is used.
        """
        found = self._found(transaction_id, refuse=refuse)
        return (yield from limited(self.dialect, self.wait_s, found)) or Verdict.UNKNOWN

    def purging(self, before: str) -> Script[int]:
        """Delete the rows of transactions older than the id `before`."""
        return (yield Statement(f"delete from {self.table} where transaction_id < {self._id}", (before,))).count  # noqa: S608

    def exporting(self, after: str, before: str, limit: int) -> Script[list[tuple[str, str]]]:
        """Read a page of transactions and reasons, in order of their ids."""
        came = yield Statement(
            f"select transaction_id, reason from {self.table} where transaction_id > {self._id} "  # noqa: S608
            f"and transaction_id < {self._id.replace('0', '1')} order by transaction_id limit {int(limit)}",
            (after, before),
        )
        return [(str(row[0]), row[1]) for row in came.rows]

    def _found(self, transaction_id: str, *, refuse: bool) -> Script[Verdict | None]:
        if refuse:
            yield self._insert(transaction_id, REFUSED)
        return (yield from self.recorded(transaction_id))

    @property
    def _id(self) -> str:
        return "cast({0} as uuid)" if self.dialect == "postgresql" else "{0}"

    def _insert(self, transaction_id: str, reason: str) -> Statement:
        sql = _INSERT[self.dialect].format(table=self.table, id=self._id, reason=reason)
        return Statement(sql, (transaction_id,))

    def _read(self, transaction_id: str) -> Statement:
        # In MySQL a plain read shows the state at the start of the database transaction.
        latest = " lock in share mode" if self.dialect == "mysql" else ""
        sql = f"select reason from {self.table} where transaction_id = {self._id}{latest}"  # noqa: S608
        return Statement(sql, (transaction_id,))
