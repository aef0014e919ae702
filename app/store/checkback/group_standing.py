"""SQL of what stands open in producer groups, and of what their checks answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from app.database.connection import Connection
from app.verdicts import CheckBackState, CheckOutcome

# The transactions of a group that are looked at; if a group has more, its counts are minimums.
GROUP_LOOKS_AT = 1000
# Of one group whose answers are counted: undecided transactions, and the latest checks of each.
ASKED_MOST, CHECKS_MOST = 200, 50

# A range of check_back_due for each group, and op by primary key in the row's own day (LATERAL … OFFSET 0), because a
# verdict may have arrived after the row was written.
STANDING = """
select g.name, u.* from unnest($1::text[]) as g(name)
cross join lateral (
  select count(*) filter (where c.state = $3) as in_doubt, count(*) filter (where c.state = $4) as parked,
    (select count(*) from (select from check_back r where r.producer_group = g.name limit $2) r) as looked_at
  from (select r.transaction_id, r.state from check_back r where r.producer_group = g.name limit $2) c
  left join lateral (select true as decided from op o where o.transaction_id = c.transaction_id offset 0) o on true
  where o.decided is null
) u
"""

# The same range, and attempt by primary key in the row's own day.
ANSWERS = f"""
select a.outcome, count(*) as checks, max(a.at) as last_at
from (select r.transaction_id from check_back r where r.producer_group = $1 limit {ASKED_MOST}) c
cross join lateral (
  select t.outcome, t.at from attempt t where t.transaction_id = c.transaction_id and t.kind = 'check'
  order by t.attempt_id desc limit {CHECKS_MOST}
) a
group by a.outcome order by checks desc, a.outcome
"""  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """The undecided transactions of a group. `exact` False: there are at least so many."""

    in_doubt: int
    parked: int
    exact: bool


@dataclass(frozen=True, slots=True)
class CheckAnswers:
    """How many checks of a group's undecided transactions had an outcome, and when the last one did."""

    outcome: CheckOutcome
    checks: int
    last_at: datetime


async def group_standings(connection: Connection, names: Sequence[str]) -> dict[str, GroupStanding]:
    """Return what stands open in each group, by name."""
    rows = await connection.fetch(
        STANDING, list(names), GROUP_LOOKS_AT + 1, CheckBackState.IN_DOUBT, CheckBackState.PARKED
    )
    return {
        row["name"]: GroupStanding(row["in_doubt"], row["parked"], row["looked_at"] <= GROUP_LOOKS_AT) for row in rows
    }


async def check_answers(connection: Connection, name: str) -> list[CheckAnswers]:
    """Return the outcomes of a group's checks, the most frequent first."""
    rows = await connection.fetch(ANSWERS, name)
    return [CheckAnswers(CheckOutcome(row["outcome"]), row["checks"], row["last_at"]) for row in rows]
