"""Read the state of the database server, and the check URLs whose last call failed."""

from dataclasses import dataclass

from app.database.connection import Connection

STATE = """
select pg_is_in_recovery() as in_recovery, current_setting('default_transaction_read_only') = 'on' as read_only,
  current_setting('fsync') = 'on' as fsync, current_setting('full_page_writes') = 'on' as full_page_writes,
  current_setting('server_version') as version
"""

# check_url is small: one row per URL of each producer group.
URLS_DOWN = """
select u.producer_group || ' ' || split_part(u.url, '?', 1) from check_url u
join producer_group g on g.name = u.producer_group and u.url = any(g.check_urls)
where g.deleted_at is null and u.last_error_at > coalesce(u.last_ok_at, '-infinity')
order by 1 limit $1
"""


@dataclass(frozen=True, slots=True)
class ServerState:
    """Whether the server accepts writes and makes them durable, and its version."""

    in_recovery: bool
    read_only: bool
    fsync: bool
    full_page_writes: bool
    version: str


async def server_state(connection: Connection) -> ServerState:
    """Return the server's state."""
    row = await connection.fetchrow(STATE)
    assert row is not None
    return ServerState(**row)


async def check_urls_down(connection: Connection, at_most: int) -> list[str]:
    """Return the check URLs whose last call failed, as `<producer group> <url>`.

    The URLs have no query, because a query may contain a token.
    """
    return [row[0] for row in await connection.fetch(URLS_DOWN, at_most)]
