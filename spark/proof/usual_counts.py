"""Reads what the days before had, which says what is usual."""

from collections.abc import Sequence
from datetime import date

from spark.postgres.connections import Connection
from spark.usual import WINDOW, Expected

# Primary key, up to 28 rows and those of the run's days. A day that was proved before counts were stored has none.
HISTORY = """
select day, volumes from reconciliation_day where day >= %s and day < %s and volumes <> '{}'
"""
# The audit has one row for each action of a person; this reads all of them, once a run. A topic whose declaration was
# removed gets no messages where HALFNOTE_TOPICS=declared.
REMOVED = """
select 'topic:' || name as name from topic
where declared_at is null and exists (select from audit where what = 'topic.undeclare' and target = topic.name)
union all
select distinct 'group:' || target from audit
where what = 'producer_group.delete' and not exists (select from producer_group where name = audit.target)
"""


def stored(connection: Connection, days: Sequence[date]) -> Expected:
    """Return the counts of the days before `days`, and which topics and groups were taken out of use."""
    if not days:
        return Expected()
    rows = connection.execute(HISTORY, [min(days) - WINDOW, max(days)]).fetchall()
    removed = {row["name"] for row in connection.execute(REMOVED)}
    return Expected(history={row["day"]: row["volumes"] for row in rows}, removed=frozenset(removed))
