"""What a producer's own key may do beside halves and ends: ask for checks, and repeat the PUT of its group."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from halfnote import Half, Refused, Transaction, TransactionProducer

from app.database.connection import Connection
from app.ids import uuid7
from app.permissions import Role
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.sdk.in_process import service
from tests.sdk.test_producer import ORDER
from tests.support.api_keys import bearer, make
from tests.support.check_stepping import SECRET, in_doubt
from tests.support.keyed_services import start

__all__ = ["start"]

URLS = ["http://127.0.0.1:9/check"]
OTHER_SECRET = "whsec_" + "M" * 43 + "="


async def producers_key(runtime: Runtime, *groups: str) -> str:
    return await make(runtime, Role.PRODUCER, producer_groups=[*groups], topics=["order"])


async def stored(db: Connection, name: str) -> tuple[Any, ...]:
    """Everything that is stored of a group but the time of its last PUT, and the number of audit rows."""
    row = dict(await db.fetchrow("select * from producer_group where name = $1", name) or {})
    for column in ("registered_at", "round_began_at", "round_reached"):
        row.pop(column, None)
    return *row.values(), await db.fetchval("select count(*) from audit")


async def due(db: Connection, transaction_id: UUID) -> bool:
    return bool(
        await db.fetchval("select next_check_at <= now() from check_back where transaction_id = $1", transaction_id)
    )


async def later(db: Connection, *transaction_ids: UUID, unanswered: int = 0) -> None:
    """Let the next checks be due in an hour."""
    await db.execute(
        "update check_back set next_check_at = now() + interval '1 h', unanswered = $2 "
        "where transaction_id = any($1::uuid[])",
        transaction_ids,
        unanswered,
    )


async def test_a_producer_asks_for_checks_of_its_own_groups(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    for name in ("shop", "bank"):
        await register_group(db, name)
    own, foreign = [await in_doubt(client, runtime, name) for name in ("shop", "bank")]
    await later(db, own, foreign)
    headers = bearer(await producers_key(runtime, "shop"))
    before = await db.fetchval("select count(*) from audit")

    answer = await client.post(f"/transactions/{own}/check", headers=headers)
    assert (answer.status_code, await due(db, own)) == (202, True)
    refused = await client.post(f"/transactions/{foreign}/check", headers=headers)
    unknown = await client.post(f"/transactions/{uuid7(runtime.clock.now())}/check", headers=headers)
    assert (refused.status_code, refused.json()["type"]) == (404, "/problems/transaction-unknown")
    assert (unknown.status_code, unknown.content) == (refused.status_code, refused.content)
    assert not await due(db, foreign)

    end = {"transaction_id": str(own), "producer_group": "shop", "verdict": "commit"}
    assert (await client.post("/end", json=end, headers=headers)).status_code == 200
    decided = await client.post(f"/transactions/{own}/check", headers=headers)
    assert (decided.status_code, decided.json()["state"]) == (409, "committed")
    assert await db.fetchval("select count(*) from audit") == before


async def test_a_block_whose_outcome_is_not_known_is_checked_at_once(start: Callable[..., Any], db: Connection) -> None:
    runtime, _ = await start()
    await register_group(db, "shop")
    key = await producers_key(runtime, "shop")

    transport = service(runtime)
    async with TransactionProducer("http://localhost", group="shop", api_key=key, transport=transport) as producer:
        [begun] = await producer.post_halves([Half(ORDER)])
        assert isinstance(begun, Transaction)
        with pytest.raises(LookupError):
            # A second run of the same work: the first may have been committed.
            async with producer.transaction(ORDER, transaction_id=begun.transaction_id):
                raise LookupError("no teapots left")
    assert await due(db, begun.transaction_id)


async def test_a_producer_that_starts_repeats_its_put(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    given = {"check_urls": URLS, "interval_s": 40, "secret": SECRET}
    assert (await client.put("/producer-groups/shop", json=given)).status_code == 201
    waiting = await in_doubt(client, runtime)
    await later(db, waiting, unanswered=3)
    key = await producers_key(runtime, "shop")
    before = await stored(db, "shop")

    for wanted in (given, {**given, "immunity_s": 6}, {**given, "secret": None}):
        await later(db, waiting, unanswered=3)
        # As if the registration before were longer ago: two of them ask for checks some seconds apart.
        await db.execute("update check_back set urged_at = null")
        dry = await client.put("/producer-groups/shop", json=wanted, params={"dry_run": True}, headers=bearer(key))
        assert (dry.status_code, await due(db, waiting)) == (200, False)
        answer = await client.put("/producer-groups/shop", json=wanted, headers=bearer(key))
        assert (answer.status_code, answer.json()["changed"], answer.json()["reset"]) == (200, [], [])
        assert "secret" not in answer.json()
        assert await due(db, waiting)
    assert await stored(db, "shop") == before


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"interval_s": 41}, "`interval_s`"),
    # Left out, so that it would get its default.
    ({"interval_s": 30}, "`interval_s`"),
    ({"check_urls": ["http://127.0.0.1:9/other"]}, "`check_urls`"),
    ({"secret": OTHER_SECRET}, "`secret`"),
    ({"checks": "claim", "batch_checks": True}, "`checks`, `batch_checks`"),
]


async def test_a_producer_changes_and_creates_no_group(
    start: Callable[..., Any], db: Connection, subtests: pytest.Subtests
) -> None:
    runtime, client = await start()
    given = {"check_urls": URLS, "interval_s": 40, "secret": SECRET}
    assert (await client.put("/producer-groups/shop", json=given)).status_code == 201
    waiting = await in_doubt(client, runtime)
    await later(db, waiting, unanswered=3)
    headers = bearer(await producers_key(runtime, "shop", "stall*"))
    before = await stored(db, "shop")
    for change, named in CHANGES:
        with subtests.test(named=named):
            refused = await client.put("/producer-groups/shop", json={**given, **change}, headers=headers)
            assert (refused.status_code, refused.json()["missing"]) == (403, {"role": ["admin"]})
            assert f"would change {named} of `shop`" in refused.json()["detail"]
            assert "An admin registers and changes groups" in refused.json()["detail"]
            assert SECRET not in refused.text
    new = await client.put("/producer-groups/stall-1", json=given, headers=headers)
    assert (new.status_code, "cannot register one" in new.json()["detail"]) == (403, True)
    # A deleted group is not registered.
    assert (await client.put("/producer-groups/stall-2", json=given)).status_code == 201
    assert (await client.delete("/producer-groups/stall-2")).status_code == 204
    deleted = await client.put("/producer-groups/stall-2", json=given, headers=headers)
    assert deleted.status_code == 403
    # Outside of the scope nothing is compared: the answer is the same whether the group exists or not.
    await register_group(db, "bank")
    foreign = [await client.put(f"/producer-groups/{name}", json=given, headers=headers) for name in ("bank", "bonk")]
    assert [one.status_code for one in foreign] == [403, 403]
    assert [one.json()["missing"] for one in foreign] == [{"groups": "bank"}, {"groups": "bonk"}]
    patched = await client.patch("/producer-groups/shop", json={}, headers=headers)
    assert (patched.status_code, patched.json()["missing"]) == (403, {"role": ["admin"]})
    assert (await stored(db, "shop"))[:-1] == before[:-1]
    assert not await due(db, waiting)


async def test_during_a_rotation_either_secret_is_no_change(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    given = {"check_urls": URLS, "secret": SECRET}
    assert (await client.put("/producer-groups/shop", json=given)).status_code == 201
    new = (await client.post("/producer-groups/shop/rotate-secret")).json()["secret"]
    headers = bearer(await producers_key(runtime, "shop"))
    before = await stored(db, "shop")
    for secret, status in ((SECRET, 200), (new, 200), (OTHER_SECRET, 403)):
        answer = await client.put("/producer-groups/shop", json={**given, "secret": secret}, headers=headers)
        assert answer.status_code == status
    assert await stored(db, "shop") == before


async def test_register_of_the_client_with_a_producers_key(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    transport, key = service(runtime), await producers_key(runtime, "shop")
    async with TransactionProducer("http://localhost", group="shop", api_key=key, transport=transport) as producer:
        with pytest.raises(Refused, match="An admin registers and changes groups") as none:
            await producer.register(URLS, interval_s=40)
        assert none.value.problem.type == "forbidden"
        assert (await client.put("/producer-groups/shop", json={"check_urls": URLS, "interval_s": 40})).is_success
        waiting = await in_doubt(client, runtime)
        await later(db, waiting, unanswered=3)
        again = await producer.register(URLS, interval_s=40)
        assert (again.created, again.secret, again.group["changed"]) == (False, None, [])
        assert await due(db, waiting)
        with pytest.raises(Refused, match="would change `interval_s`"):
            await producer.register(URLS)
