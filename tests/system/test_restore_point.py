"""A restore to an earlier time by the steps of docs/operations/backup.md: a base backup, archived WAL, a target."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.migrate import migrate
from tests.support.check_responder import Responder
from tests.support.load import until
from tests.support.postgres_copies import base_backup, execute, is_true
from tests.support.processes import ROOT, Service
from tests.support.relay_stepping import order, subscribe

PAGE = ROOT / "docs" / "operations" / "backup.md"
TARGET = "before_the_mistake"
# More than a sequence writes ahead to the WAL, so that the restored sequence is behind the offsets in use.
LATER = 50
# Longer than the lease of the worker at the target. Checks and retries are due each second.
WATCHED_S = 12


@pytest.mark.slow
async def test_the_effects_of_a_restore_to_an_earlier_time(data_dir: Path) -> None:
    place, restored = find_paths(data_dir), find_paths(data_dir.parent / "restored")
    wal = data_dir.parent / "wal"
    wal.mkdir()
    place.account.own(wal)
    archiving = {"archive_mode": "on", "archive_command": f"test ! -f {wal}/%f && cp %p {wal}/%f"}
    server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir, settings=archiving)
    async with (
        Responder(content={"verdict": "unknown"}) as producer,
        Responder(status=200) as receiver,
        Responder(status=503) as former,
    ):
        try:
            await migrate(server.url, days_ahead=7)
            async with served(data_dir, server.url) as client:
                policy = {"check_urls": [producer.url], "immunity_s": 1, "interval_s": 1, "max_checks": 1000}
                assert (await client.put("/producer-groups/shop", json=policy)).status_code == 201
                await subscribe(client, receiver, retry=[1] * 100)
                await subscribe(client, former, "former", retry=[1] * 100)
                settled = [await committed(client, number) for number in range(3)]
                await until(lambda: set(settled) <= received(receiver))
                await settle(server.url, 3)
                await asyncio.to_thread(base_backup, server, place, restored, "-X", "none")
                (restored.pgdata / "recovery.signal").touch()
                restored.account.own(restored.pgdata / "recovery.signal")
                # At the target there are one message that no receiver has and one transaction without an end.
                receiver.status = 503
                unsent = await committed(client, 3)
                await until(lambda: unsent in received(receiver))
                open_half = await half(client, 4)
                await execute(server.url, f"select pg_create_restore_point('{TARGET}')")
                # The restore undoes what follows.
                assert (await client.post("/subscriptions/former/pause")).status_code == 200
                receiver.status = 200
                await end(client, open_half)
                lost = await committed(client, 5)
                later = [await committed(client, 100 + number) for number in range(LATER)]
                await until(lambda: {unsent, f"{open_half}-0", lost, *later} <= delivered(receiver))
                first_offset = offset_of(receiver, settled[0])
                lost_replay = await replay(client, first_offset)
                await until(lambda: (settled[0], lost_replay) in replayed(receiver))
            await execute(server.url, "select pg_switch_wal()")
            await until(lambda: all_archived(server.url))
        finally:
            await asyncio.to_thread(server.stop)
        highest = max(offsets(receiver))
        calls_before = len(receiver.calls)

        recovery = {"restore_command": f"cp {wal}/%f %p", "recovery_target_name": TARGET}
        recovery["recovery_target_action"] = "promote"
        server = await asyncio.to_thread(EmbeddedPostgres.start, data_dir.parent / "restored", settings=recovery)
        try:
            await until(lambda: is_true(server.url, "select not pg_is_in_recovery()"))
            # Without this step, offsets that receivers have seen would be used for other messages.
            assert await is_true(server.url, f"select last_value < {highest} from outbox_offset")
            # And without this one, the number of a replay that receivers have seen.
            assert await is_true(server.url, f"select last_value <= {lost_replay} from replay_replay_id_seq")
            for statement in re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL):
                await execute(server.url, statement)
            # The subscription is active again, so it is paused before a worker starts. An API alone sends nothing.
            calls_of_former, checks_before = len(former.calls), len(producer.calls)
            async with served(data_dir, server.url, HALFNOTE_ROLE="api", HALFNOTE_ACCEPT="ends") as client:
                assert (await client.get("/subscriptions/former")).json()["state"] == "active"
                await asyncio.sleep(WATCHED_S)
                assert len(receiver.calls) == calls_before
                assert (await client.post("/subscriptions/former/pause")).status_code == 200
            assert (len(former.calls), len(producer.calls)) == (calls_of_former, checks_before)
            producer.content = {"verdict": "commit"}
            async with served(data_dir, server.url) as client:
                # The transaction is undecided again: its producer is checked, and answers as before.
                await until(lambda: {unsent, f"{open_half}-0"} <= delivered(receiver, calls_before))
                transaction = (await client.get(f"/transactions/{open_half}")).json()
                assert (transaction["state"], transaction["verdict"]["source"]) == ("committed", "check")
                # The restored service does not know this transaction. If its producer repeats the half and the end, it
                # is delivered with the same id.
                unknown = lost.removesuffix("-0")
                assert (await post_end(client, unknown)).status_code == 404
                assert await half(client, 5, transaction_id=unknown) == unknown
                await end(client, unknown)
                await until(lambda: lost in delivered(receiver, calls_before))
                # A receiver that runs each replay once knows the number of the lost one.
                new_replay = await replay(client, first_offset)
                assert new_replay > lost_replay
                await until(lambda: (settled[0], new_replay) in replayed(receiver))
        finally:
            await asyncio.to_thread(server.stop)
    assert len(former.calls) == calls_of_former
    again = [call for call in receiver.calls[calls_before:] if "halfnote-replay" not in call.headers]
    assert not {call.headers["ce-id"] for call in again} & {*settled, *later}
    new_offsets = {call.headers["ce-id"]: int(call.headers["halfnote-offset"]) for call in again}
    assert min(new_offsets[f"{open_half}-0"], new_offsets[lost]) > highest


def received(receiver: Responder, since: int = 0) -> set[str]:
    return {call.headers["ce-id"] for call in receiver.calls[since:]}


def delivered(receiver: Responder, since: int = 0) -> set[str]:
    """Return what was received while the receiver accepts messages, as it does now."""
    assert receiver.status == 200
    return received(receiver, since)


def offsets(receiver: Responder) -> list[int]:
    return [int(call.headers["halfnote-offset"]) for call in receiver.calls]


def offset_of(receiver: Responder, message_id: str) -> int:
    return next(int(call.headers["halfnote-offset"]) for call in receiver.calls if call.headers["ce-id"] == message_id)


def replayed(receiver: Responder) -> set[tuple[str, int]]:
    """Return the ids of replayed messages, each with the number of its replay."""
    calls = [call for call in receiver.calls if "halfnote-replay" in call.headers]
    return {(call.headers["ce-id"], int(call.headers["halfnote-replay"])) for call in calls}


async def replay(client: httpx.AsyncClient, offset: int) -> int:
    """Replay the message at an offset; return the number of the replay."""
    part = {"offset": offset}
    answer = await client.post("/subscriptions/mailer/replay", json={"from": part, "until": part})
    assert answer.status_code == 202, answer.text
    return int(answer.json()["replay_id"])


class served:
    """The service on a database, and its client. `env`: more settings."""

    def __init__(self, data_dir: Path, url: str, **env: str) -> None:
        # The test may take longer than the five minutes that a new id may be old.
        self._service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=url, HALFNOTE_ID_SKEW_S="86400", **env)

    async def __aenter__(self) -> httpx.AsyncClient:
        await self._service.start()
        self._client = httpx.AsyncClient(base_url=self._service.url, timeout=60)
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        assert await asyncio.to_thread(self._service.stop) == 0


async def half(client: httpx.AsyncClient, number: int, **fields: Any) -> str:
    answer = await client.post("/half", json={"producer_group": "shop", "messages": [order(number)], **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def post_end(client: httpx.AsyncClient, transaction_id: str) -> httpx.Response:
    request = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": "commit"}
    return await client.post("/end", json=request)


async def end(client: httpx.AsyncClient, transaction_id: str) -> None:
    answer = await post_end(client, transaction_id)
    assert answer.status_code == 200, answer.text


async def committed(client: httpx.AsyncClient, number: int) -> str:
    """Post a half and its end; return the message's id."""
    transaction_id = await half(client, number)
    await end(client, transaction_id)
    return f"{transaction_id}-0"


async def settle(url: str, count: int) -> None:
    await until(lambda: is_true(url, f"select count(*) >= {count} from receipt"))


async def all_archived(url: str) -> bool:
    """Return whether the WAL up to the last switch is in the archive."""
    return await is_true(
        url, "select last_archived_wal >= pg_walfile_name(pg_current_wal_lsn() - 1) from pg_stat_archiver"
    )
