"""Estimates how many rows a run reads, before Spark starts."""

from spark.postgres.connections import Connection
from spark.schemas import BIG

SMALL_ROWS = 300_000
# Statistics and the catalog: no table is read or locked. The size of a file would need a lock, and a day that is being
# removed would hold up the run. `reltuples` is -1 before the first ANALYZE, and a crash of Postgres loses the counters.
STORED = """
select coalesce(sum(greatest(c.reltuples, pg_stat_get_live_tuples(c.oid), 0)), 0)::bigint as rows
from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = any(array(select to_regclass(name) from unnest(%s::text[]) name))
"""


def is_small(connection: Connection) -> bool:
    """Return whether the database has so few rows that starting Spark and planning take most of a run."""
    row = connection.execute(STORED, [list(BIG)]).fetchone()
    assert row is not None
    return int(row["rows"]) < SMALL_ROWS
