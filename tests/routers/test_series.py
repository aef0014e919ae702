"""`GET /stats/series`: figures over time, from the rows of minutes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.routers.stats import POINTS_MAX
from app.runtime.state import Runtime
from app.schemas.series import Metric
from app.store.admin.minutes import DONE, STANDS

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def minutes(runtime: Runtime, db: Connection) -> None:
    """Figures of the ten minutes before AT: 1 to 10 halves; 9 to 0 in doubt, not known in the second one."""
    runtime.clock.fixed = AT
    for number in range(10):
        doubt = None if number == 1 else 9 - number
        at = AT - (10 - number) * MINUTE
        await db.execute(
            "insert into stats_minute (minute, halves, in_doubt) values ($1, $2, $3)", at, number + 1, doubt
        )


async def series(client: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    asked = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in query.items()}
    answer = await client.get("/stats/series", params=asked)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def values(found: dict[str, Any]) -> list[float | None]:
    return [point["value"] for point in found["points"]]


@pytest.mark.usefixtures("minutes")
async def test_what_was_done_is_summed_and_of_what_stood_open_the_most_counts(client: httpx.AsyncClient) -> None:
    since = {"from": AT - 10 * MINUTE, "step": 120}
    done = await series(client, metric="halves", **since)
    assert (done["of_step"], done["step_s"]) == ("sum", 120)
    assert values(done) == [3, 7, 11, 15, 19]
    assert datetime.fromisoformat(done["points"][1]["at"]) == AT - 8 * MINUTE
    open_ = await series(client, metric="in_doubt", **since)
    assert open_["of_step"] == "max"
    assert values(open_) == [9, 7, 5, 3, 1]


@pytest.mark.usefixtures("minutes")
async def test_before_the_first_figure_nothing_is_known(client: httpx.AsyncClient, db: Connection) -> None:
    await db.execute("delete from stats_minute where minute = $1", AT - 5 * MINUTE)
    since = {"from": AT - 12 * MINUTE, "to": AT - 3 * MINUTE, "step": 60}
    # A minute in which no process did anything has no row.
    assert values(await series(client, metric="halves", **since)) == [None, None, 1, 2, 3, 4, 5, 0, 7]
    assert values(await series(client, metric="in_doubt", **since)) == [None, None, 9, None, 7, 6, 5, None, 3]


@pytest.mark.usefixtures("minutes")
async def test_a_range_has_defaults_and_ends_now(client: httpx.AsyncClient) -> None:
    found = await series(client, metric="halves")
    assert (len(found["points"]), sum(filter(None, values(found)))) == (144, 55)
    later = await series(client, metric="halves", **{"from": AT - MINUTE, "to": AT + timedelta(days=9), "step": 60})
    assert values(later) == [10]
    assert values(await series(client, metric="halves", **{"from": AT + MINUTE})) == []
    # It begins at a whole minute.
    begun = await series(client, metric="halves", **{"from": AT - timedelta(seconds=90), "step": 60})
    assert values(begun) == [9, 10]


@pytest.mark.usefixtures("minutes")
async def test_a_range_has_a_limit(client: httpx.AsyncClient) -> None:
    longest = {"metric": "halves", "step": 60}
    since = AT - POINTS_MAX * MINUTE
    assert len(values(await series(client, **longest, **{"from": since}))) == POINTS_MAX
    for asked, field in (
        ({**longest, "from": (since - MINUTE).isoformat()}, "step"),
        ({"metric": "halves", "step": 90}, "step"),
        ({"metric": "halves", "step": 0}, "step"),
        ({"metric": "weight"}, "metric"),
        ({"metric": "halves", "from": "yesterday"}, "from"),
        ({"metric": "halves", "since": AT.isoformat()}, "since"),
        ({}, "metric"),
    ):
        answer = await client.get("/stats/series", params=asked)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text


async def test_every_figure_has_a_series(client: httpx.AsyncClient) -> None:
    assert Metric.__args__ == (*DONE, *STANDS)  # type: ignore[attr-defined]
    for metric in (*DONE, *STANDS):
        assert {*values(await series(client, metric=metric))} == {None}
