"""The rounds that go on after their registrations: in turn, one worker at each, and no group before all others."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import product

import asyncpg
import httpx
import pytest
from aiohttp import web

from app.checkback import registrations
from app.checkback.loop import CheckBack
from app.checkback.registrations import LEFT_EVERY_S, Rounds
from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection, connect
from app.runtime.state import Runtime
from app.store.checkback import rounds
from app.store.checkback.rounds import AskedBatch, AskingRound, ask_waiting, begin_round, round_of
from tests.support.check_responder import Call, Responder
from tests.support.check_stepping import COMMIT, in_doubt, many_in_doubt, turn
from tests.support.postgres import IN_THIS_DATABASE

URGED = "select count(*) from check_back where producer_group = $1 and urged_at is not null"
LATER_S = 600


async def rounds_of(client: httpx.AsyncClient, runtime: Runtime, db: Connection, sizes: Sequence[int]) -> list[str]:
    """Begin rounds of groups that have so many unanswered checks each, the first one longest ago; return the names."""
    names = [f"group-{n:02}" for n in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        assert (await client.put(f"/producer-groups/{name}", json={"check_urls": ["http://127.0.0.1:9/"]})).is_success
        await many_in_doubt(db, runtime, name, size)
    now = runtime.clock.now()
    await _wait(db, runtime)
    await db.execute("update producer_group set round_reached = null")
    for n, name in enumerate(names):
        await begin_round(db, name, now - timedelta(seconds=100 - n))
    return names


async def _wait(db: Connection, runtime: Runtime, unanswered: int = 9) -> None:
    """Have all checks of transactions that are in doubt for an hour wait for their next try, each at its own time."""
    await db.execute(
        "update check_back c set next_check_at = $1::timestamptz + o.n * interval '1 us', unanswered = $2, "
        "swept_at = c.swept_at - interval '1 hour' + o.n * interval '1 us' from "
        "(select transaction_id, row_number() over (order by transaction_id) as n from check_back) o "
        "where o.transaction_id = c.transaction_id",
        runtime.clock.now() + timedelta(seconds=LATER_S),
        unanswered,
    )


async def fail(db: Connection, groups: Sequence[str]) -> None:
    """Have every statement fail that asks a check of these groups."""
    await db.execute(
        "create function no() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$; "
        f"create trigger no before update on check_back for each row when (new.producer_group in ({_list(groups)})) "
        "execute function no()"
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


async def test_a_round_that_fails_stops_no_other(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    names = await rounds_of(client, runtime, db, [5, 5, 5])
    await fail(db, names[:1])
    assert (await Rounds().step(runtime, runtime.clock.now())).done == 2
    assert [await db.fetchval(URGED, name) for name in names] == [0, 5, 5]
    assert await round_of(db, names[0]) is not None


async def test_a_step_fails_if_all_of_its_rounds_fail(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "GROUPS_AT_ONCE", 2)
    names = await rounds_of(client, runtime, db, [5, 5, 5])
    await fail(db, names[:2])
    loop = Rounds()
    with pytest.raises(asyncpg.RaiseError):
        await loop.step(runtime, runtime.clock.now())
    # The next step is that of the others.
    assert (await loop.step(runtime, runtime.clock.now())).done == 1
    assert [await db.fetchval(URGED, name) for name in names] == [0, 0, 5]


async def test_a_statement_reads_a_bounded_part_of_a_group(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """A round waits for checks before its own that are due soon, and the loop does not try it at once again."""
    [name] = await rounds_of(client, runtime, db, [rounds.READ_MOST + 5])
    now = runtime.clock.now()
    asked = "(select transaction_id from check_back order by swept_at limit $1)"
    # A round asked for all but five, and they were tried again. The five are in doubt since then.
    await db.execute("update check_back set swept_at = $1", now - timedelta(seconds=1))
    await db.execute(
        f"update check_back set urged_at = $2, next_check_at = $3 where transaction_id in {asked}",
        rounds.READ_MOST,
        now - timedelta(seconds=5),
        now + timedelta(seconds=3),
    )
    await begin_round(db, name, now)
    loop = Rounds()
    result = await loop.step(runtime, now)
    assert (result.done, result.more, result.within_s) == (0, False, LEFT_EVERY_S)
    new = "select count(*) from check_back where urged_at >= $1"
    assert await db.fetchval(new, now) == 0
    await db.execute("update check_back set unanswered = 0 where urged_at is not null")
    await loop.step(runtime, now)
    assert await db.fetchval(new, now) == 5
    assert await round_of(db, name) is None


@pytest.mark.parametrize("by", ["a person", "an earlier round"])
async def test_checks_in_flight_that_others_follow_keep_no_round_from_the_rest(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, by: str
) -> None:
    """A producer may hold a claim for an hour."""
    [name] = await rounds_of(client, runtime, db, [rounds.READ_MOST + 50])
    runtime.clock.fixed = now = runtime.clock.now()
    asked = now - timedelta(seconds=60)
    await db.execute(
        "update check_back set asked_at = $2, urged_at = $3, leased_until = $4 "
        "where transaction_id in (select transaction_id from check_back order by swept_at limit $1)",
        rounds.READ_MOST,
        asked,
        None if by == "a person" else asked,
        now + timedelta(seconds=3600),
    )
    await db.execute("update check_back set swept_at = $1 where leased_until is null", now - timedelta(seconds=1))
    await begin_round(db, name, now)
    loop, steps = Rounds(), 1
    while (await loop.step(runtime, now)).more:
        steps += 1
    assert steps == rounds.READ_MOST // rounds.AT_ONCE + 1
    waits = "select count(*) from check_back where leased_until is null and next_check_at > $1"
    assert await db.fetchval(waits, now) == 0
    assert await round_of(db, name) is None
    # What a person asked for is asked also if the check in flight is answered, and what a round asked for is not.
    kept = await db.fetch("select distinct asked_at, urged_at from check_back where leased_until is not null")
    assert [tuple(row) for row in kept] == [(asked if by == "a person" else now, now)]


async def test_a_round_reaches_newer_checks_while_the_last_one_s_are_in_flight(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    [name] = await rounds_of(client, runtime, db, [rounds.READ_MOST + 1100])
    runtime.clock.fixed = now = runtime.clock.now()
    left = "select transaction_id from check_back order by swept_at desc"
    await db.execute(f"update check_back set unanswered = 0 where transaction_id in ({left} limit 100)")
    await db.execute(
        "update check_back set leased_until = $1 where transaction_id not in (select transaction_id from check_back "
        "order by swept_at desc limit 600)",
        now + timedelta(seconds=3600),
    )
    loop = Rounds()
    while (await loop.step(runtime, now)).more:
        pass
    assert await db.fetchval(URGED, name) == rounds.READ_MOST + 1000
    await db.execute("update check_back set swept_at = $1, unanswered = 1 where unanswered = 0", now)
    runtime.clock.fixed = now = now + timedelta(seconds=60)
    await db.execute("update check_back set next_check_at = $1", now + timedelta(seconds=LATER_S))
    await begin_round(db, name, now)
    while (await loop.step(runtime, now)).more:
        pass
    assert await db.fetchval("select count(*) from check_back where next_check_at = $1", now) == 600
    assert await round_of(db, name) is None


async def test_a_registration_asks_each_check_in_flight_once_though_its_round_began_later(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of another process is ahead, and a producer registered there a moment before."""
    monkeypatch.setattr(rounds, "AT_ONCE", 2)
    await many_in_doubt(db, runtime, group, 6)
    now = runtime.clock.now()
    await _wait(db, runtime)
    await db.execute(
        "update check_back set asked_at = $1, leased_until = $2", now - timedelta(seconds=60), now + timedelta(hours=1)
    )
    await begin_round(db, group, now + timedelta(seconds=3))
    one = await round_of(db, group)
    assert one is not None
    found = [(await rounds.ask_in_flight(db, one, now)).found for _ in range(4)]
    assert found == [2, 2, 2, 0]


@pytest.mark.parametrize("began_s", [-3.0, 0.0, 3.0])
async def test_a_round_asks_exactly_the_checks_in_flight_that_need_it(
    db: Connection, runtime: Runtime, group: str, began_s: float
) -> None:
    """Each combination of times around now, and around the round's begin, has a row."""
    now = runtime.clock.now()
    around = [None, *(now + timedelta(seconds=s) for s in (-60, -3, -2, 0, 2, 3, 60))]
    states = [
        (since, urged, leased, asked, unanswered)
        for since, urged, leased, asked in product(around[1:], around, (around[0], around[1], around[7]), around)
        for unanswered in (0, 1)
    ]
    ids = await many_in_doubt(db, runtime, group, len(states))
    await db.executemany(
        "update check_back set swept_at = $2, urged_at = $3, leased_until = $4, asked_at = $5, unanswered = $6, "
        "next_check_at = $7 where transaction_id = $1",
        [(one, *state, now + timedelta(seconds=LATER_S)) for one, state in zip(ids, states, strict=True)],
    )
    await db.execute("update check_back set state = 2 where transaction_id = any ($1)", ids[::11])
    began = now + timedelta(seconds=began_s)
    wanted = set()
    for one in await db.fetch("select * from check_back"):
        since = one["urged_at"] or one["swept_at"]
        is_in_flight = one["leased_until"] is not None and one["leased_until"] > now
        is_left = one["state"] == 1 and one["unanswered"] > 0 and (since < began or since > now)
        if is_in_flight and is_left and (one["asked_at"] is None or since < min(now, began)):
            wanted.add(one["transaction_id"])
    assert wanted
    before = {one["transaction_id"]: one for one in await db.fetch("select *, xmin from check_back")}
    found = await rounds.ask_in_flight(db, AskingRound(group, began), now)
    after = {one["transaction_id"]: one for one in await db.fetch("select *, xmin from check_back")}
    assert found == AskedBatch(len(wanted), left=False)
    assert {one for one, row in after.items() if row["xmin"] != before[one]["xmin"]} == wanted
    assert all(after[one]["asked_at"] is not None and after[one]["urged_at"] is not None for one in wanted)


async def test_a_round_reads_no_checks_that_were_answered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    [name] = await rounds_of(client, runtime, db, [2 * rounds.READ_MOST + 5])
    await db.execute(
        "update check_back set unanswered = 0 where transaction_id in "
        "(select transaction_id from check_back order by swept_at limit $1)",
        2 * rounds.READ_MOST,
    )
    one = await round_of(db, name)
    assert one is not None
    assert await ask_waiting(db, one, runtime.clock.now()) == AskedBatch(5, left=False)


async def test_starts_that_follow_each_other_do_not_keep_the_worker_from_a_round(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    [name] = await rounds_of(client, runtime, db, [5])
    await begin_round(db, name, runtime.clock.now())
    assert (await Rounds().step(runtime, runtime.clock.now())).done == 1
    assert await db.fetchval(URGED, name) == 5


async def test_a_newer_transaction_waits_behind_a_bounded_part_of_a_round(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 60)
    put = {"check_urls": ["http://127.0.0.1:9/"]}
    await client.put("/producer-groups/shop", json=put)
    size = 6 * rounds.AT_ONCE
    await many_in_doubt(db, runtime, "shop", size)
    await _wait(db, runtime)
    assert (await client.put("/producer-groups/shop", json=put)).status_code == 200
    monkeypatch.setattr(registrations, "ASKED_WITHIN_S", 0)
    loop = Rounds()
    for _ in range(3):
        result = await loop.step(runtime, runtime.clock.now())
        assert (result.done, result.more) == (0, False)
    new = await in_doubt(client, runtime)
    earlier = (
        "select count(*) from check_back where next_check_at < "
        "(select next_check_at from check_back where transaction_id = $1)"
    )
    assert await db.fetchval(earlier, new) == rounds.DUE_MOST
    # It goes on while its checks are asked.
    tried = "update check_back set leased_until = $1 where next_check_at <= $2 and leased_until is null"
    for _ in range(size):
        now = runtime.clock.now()
        if await round_of(db, "shop") is None:
            break
        await db.execute(tried, now + timedelta(seconds=60), now)
        await loop.step(runtime, now)
    assert await db.fetchval(URGED, "shop") == size


async def test_groups_take_turns(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while those whose rounds began first have many checks."""
    monkeypatch.setattr(registrations, "GROUPS_AT_ONCE", 2)
    monkeypatch.setattr(rounds, "AT_ONCE", 10)
    names = await rounds_of(client, runtime, db, [35, 35, 35, 5, 10])
    loop, urged = Rounds(), []
    for _ in range(4):
        assert (await loop.step(runtime, runtime.clock.now())).more
        urged.append([await db.fetchval(URGED, name) for name in names])
    assert urged == [[10, 10, 0, 0, 0], [10, 10, 10, 5, 0], [20, 10, 10, 5, 10], [20, 20, 20, 5, 10]]
    while (await loop.step(runtime, runtime.clock.now())).more:
        pass
    assert [await db.fetchval(URGED, name) for name in names] == [35, 35, 35, 5, 10]


async def test_groups_that_wait_do_not_keep_a_step_from_the_others(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the loop rests once each had its turn."""
    monkeypatch.setattr(registrations, "GROUPS_AT_ONCE", 2)
    monkeypatch.setattr(rounds, "DUE_MOST", 3)
    names = await rounds_of(client, runtime, db, [5, 5, 5, 5])
    due = "update check_back set next_check_at = $1 where producer_group = any($2)"
    await db.execute(due, runtime.clock.now(), [names[0], names[1], names[3]])
    loop = Rounds()
    results = [await loop.step(runtime, runtime.clock.now()) for _ in range(3)]
    assert [(one.done, one.more) for one in results] == [(0, True), (1, True), (0, False)]
    assert await db.fetchval(URGED, names[2]) == 5


async def test_one_worker_at_a_time_is_at_a_round(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    names = await rounds_of(client, runtime, db, [5, 5])
    other = await connect(dsn)
    async with other.transaction():
        assert await rounds.take_round(other, names[0])
        held = f"select count(*) from pg_locks where locktype = 'advisory' and classid = $1 and {IN_THIS_DATABASE}"
        assert await db.fetchval(held, AdvisoryLock.ROUNDS) == 1
        result = await Rounds().step(runtime, runtime.clock.now())
        assert result.within_s == LEFT_EVERY_S
        assert (result.done, result.more) == (1, False)
        assert [await db.fetchval(URGED, name) for name in names] == [0, 5]
    assert (await Rounds().step(runtime, runtime.clock.now())).done == 1
    assert await db.fetchval(URGED, names[0]) == 5
    await other.close()


async def test_after_the_clock_went_back_a_registration_asks_soon(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    runtime.clock.fixed = now = runtime.clock.now()
    await many_in_doubt(db, runtime, group, 1)
    late, later = now + timedelta(hours=1), now + timedelta(hours=2)
    await db.execute("update check_back set next_check_at = $1, unanswered = 9, urged_at = $2", later, late)
    await begin_round(db, group, now)
    await registrations.ask_unanswered(db, group, now)
    soon = now + timedelta(seconds=rounds.URGED_APART_S)
    assert tuple(await db.fetchrow("select next_check_at, urged_at from check_back")) == (soon, soon)


async def test_after_the_clock_went_back_a_round_goes_on(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    """It began at a time that is not over, and its place is such a time too."""
    await many_in_doubt(db, runtime, group, 5)
    await _wait(db, runtime)
    await begin_round(db, group, runtime.clock.now() + timedelta(hours=1))
    loop = Rounds()
    await loop.step(runtime, runtime.clock.now())
    runtime.clock.offset_s += registrations.ASKED_WITHIN_S + 1
    await loop.step(runtime, runtime.clock.now())
    assert await db.fetchval(URGED, group) == 5
    assert await round_of(db, group) is None


async def test_starts_that_follow_each_other_reach_all_checks_though_half_of_them_are_never_answered(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start begins with the checks that none asked for, or that one asked for longest ago."""
    monkeypatch.setattr(rounds, "AT_ONCE", 2)
    monkeypatch.setattr(rounds, "DUE_MOST", 4)
    checks, loop = CheckBack(), Rounds()

    async def answer(call: Call) -> web.Response:
        transaction_id = call.json()["transaction_id"]
        return web.Response(status=500) if transaction_id in never else web.json_response(COMMIT)

    async with Responder(answer) as shop:
        put = {"check_urls": [shop.url], "check_max_in_flight": 2}
        await client.put("/producer-groups/shop", json=put)
        ids = await many_in_doubt(db, runtime, "shop", 12)
        never = {str(one) for one in ids[:6]}
        await _wait(db, runtime, unanswered=1)
        runtime.clock.fixed = runtime.clock.now()
        # The others would be due by themselves after LATER_S.
        for _ in range(LATER_S // 5 // 10):
            runtime.clock.fixed += timedelta(seconds=5)
            assert (await client.put("/producer-groups/shop", json=put)).status_code == 200
            await turn(runtime, checks)
            await loop.step(runtime, runtime.clock.now())
    assert {row[0] for row in await db.fetch("select transaction_id from op")} == set(ids[6:])
