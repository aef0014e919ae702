"""Find the sessions that keep another one waiting for a lock."""

from app.database.connection import Connection

# pg_blocking_pids looks at the lock table once; the rest is the primary key of a view of a few hundred sessions.
BLOCKERS = """
select b.pid, coalesce(nullif(b.application_name, ''), b.backend_type) as program, b.usename, b.client_addr::text,
  to_char(b.xact_start at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') as since
from unnest(pg_blocking_pids($1)) as blocking join pg_stat_activity b on b.pid = blocking
order by b.xact_start nulls last, b.pid limit 3
"""


async def blockers_of(connection: Connection, pid: int) -> tuple[str, ...]:
    """Return the sessions that block a session now, the oldest first and at most three, as a person looks for them."""
    return tuple(
        f"{row['program']} (pid {row['pid']}"
        + (f", user {row['usename']}" if row["usename"] else "")
        + (f", from {row['client_addr']}" if row["client_addr"] else "")
        + (f", since {row['since']} UTC)" if row["since"] else ")")
        for row in await connection.fetch(BLOCKERS, pid)
    )
