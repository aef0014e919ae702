"""API keys: how they are created, stored, replaced and revoked; what is shown of them, and what never is."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import BadAdminKeyFile, Settings
from app.database.connection import Connection
from app.loops.live_settings import RETRY_AFTER, LiveSettingsReader
from app.permissions import KEY_CHARACTERS, is_key, new_key
from tests.admission.test_request_guard import raw_call
from tests.conftest import shares
from tests.support.api_keys import bearer
from tests.support.keyed_services import CONFIGURED, made, shared_admin, start, status
from tests.support.processes import ROOT, Service, free_port

__all__ = ["shared_admin", "start"]


def test_a_key_has_256_bits_in_43_characters() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {3 + KEY_CHARACTERS}
    assert all(map(is_key, keys))
    assert 62**KEY_CHARACTERS > 2**256
    for no_key in ("", "hn_", "hn_short", "hx_" + "a" * 43, "hn_" + "a" * 42 + "-", "hn_" + "a" * 43 + "\n"):
        assert not is_key(no_key)


async def test_only_the_digest_is_stored_and_the_key_is_shown_once(
    start: Callable[..., Any], db: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    _, client = await start()
    key = (await made(client))["key"]
    row = await db.fetchrow("select digest, prefix, api_key::text as whole from api_key")
    assert row is not None
    assert row["digest"] == sha256(key.encode()).digest()
    assert key.startswith(row["prefix"])
    assert len(row["prefix"]) == 9
    listed = (await client.get("/api-keys")).text + (await client.get("/api-keys/1")).text
    audited = (await client.get("/audit")).text
    printed = capfd.readouterr()
    for place in (row["whole"], listed, audited, printed.out, printed.err):
        assert key not in place
        assert key[9:] not in place
    assert '"what":"api_key.create"' in audited


@shares
@pytest.mark.parametrize(
    ("authorization", "detail"),
    [
        (None, "No key came"),
        ("", "not known"),
        ("Bearer", "not known"),
        ("Bearer ", "not known"),
        ("Basic aG46aG4=", "not known"),
        (CONFIGURED, "not known"),
        (f"Bearer hn_{'k3Y' * 15}", "not known"),
        (f"Bearer {CONFIGURED}x", "not known"),
        (f"Bearer {CONFIGURED[:-1]}", "not known"),
        (f"Bearer {CONFIGURED.swapcase()}", "not known"),
        (f"Bearer {CONFIGURED}, Bearer {CONFIGURED}", "not known"),
        ("Bearer \u00ff", "not known"),
    ],
)
async def test_an_invalid_key_is_401(shared_admin: httpx.AsyncClient, authorization: str | None, detail: str) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    for path in ("/half", "/topics", "/nowhere"):
        method = "POST" if path == "/half" else "GET"
        request = shared_admin.build_request(method, path, headers=headers)
        if authorization is None:
            del request.headers["authorization"]
        answer = await shared_admin.send(request)
        assert answer.status_code == 401
        assert detail in answer.json()["detail"]
        assert answer.headers["www-authenticate"].startswith('Bearer realm="halfnote"')
        assert ("invalid_token" in answer.headers["www-authenticate"]) == (authorization is not None)


@shares
async def test_the_scheme_is_in_any_case(shared_admin: httpx.AsyncClient) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = await shared_admin.get("/topics", headers={"authorization": f"{scheme} {CONFIGURED}"})
        assert answer.status_code == 200


async def test_a_body_without_a_key_is_not_read(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    app = client._transport.app

    async def endless() -> AsyncIterator[bytes]:
        raise AssertionError("the body was asked for")
        yield b""

    for path in ("/half", "/producer-groups/shop"):
        method = "POST" if path == "/half" else "PUT"
        status, problem = await raw_call(app, method, path, {"content-length": "1000000"}, endless())
        assert (status, problem["type"]) == (401, "/problems/unauthenticated")
    assert runtime.load_limits.in_flight == 0


async def test_a_key_of_another_replica_is_known_and_its_end_as_well(start: Callable[..., Any]) -> None:
    _, one = await start()
    other, two = await start()
    key = await made(one)
    assert await status(one, key["key"]) == 200
    assert await status(two, key["key"]) == 401
    await LiveSettingsReader().step(other, other.clock.now())
    assert await status(two, key["key"]) == 200
    assert (await one.delete(f"/api-keys/{key['key_id']}")).status_code == 204
    refused = await one.get("/metrics", headers=bearer(key["key"]))
    assert refused.status_code == 401
    assert "was revoked" in refused.json()["detail"]
    await LiveSettingsReader().step(other, other.clock.now())
    assert await status(two, key["key"]) == 401
    assert (await one.delete(f"/api-keys/{key['key_id']}")).status_code == 204
    acts = (await one.get("/audit", params={"what": "api_key.revoke"})).json()["items"]
    assert len(acts) == 1


async def test_without_news_no_keys_are_read(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    await made(client)
    await LiveSettingsReader().step(runtime, runtime.clock.now())
    # Behind the service's back, so without the news.
    await db.execute("update api_key set revoked_at = now()")
    before = runtime.authenticator.version
    await LiveSettingsReader().step(runtime, runtime.clock.now())
    assert runtime.authenticator.version == before
    assert runtime.authenticator.has_admin


async def test_a_key_expires_by_the_databases_clock(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    now = runtime.clock.now()
    expires = (now + timedelta(hours=1)).isoformat()
    key = (await made(client, expires_at=expires))["key"]
    assert await status(client, key) == 200
    runtime.clock.fixed = now + timedelta(minutes=61)
    refused = await client.get("/metrics", headers=bearer(key))
    assert refused.status_code == 401
    assert "has expired" in refused.json()["detail"]
    over = await client.post("/api-keys", json={"name": "x", "role": "metrics", "expires_at": expires})
    assert (over.status_code, over.json()["field"]) == (422, "expires_at")


async def test_a_rotation_overlaps(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    now = runtime.clock.now()
    scope = {"producer_groups": ["shop"], "topics": ["order"], "rate_per_s": 1030.0}
    former = await made(client, "producer", **scope)
    answer = await client.post(f"/api-keys/{former['key_id']}/rotate", json={"overlap_s": 600})
    assert answer.status_code == 201
    new = answer.json()
    same = ("name", "role", "producer_groups", "topics", "subscriptions", "rate_per_s")
    assert {name: new[name] for name in same} == {name: former[name] for name in same}
    assert new["rotated_from"] == former["key_id"]
    assert new["key"] != former["key"]
    assert [await status(client, one["key"], "/topics") for one in (former, new)] == [200, 200]
    runtime.clock.fixed = now + timedelta(seconds=605)
    assert [await status(client, one["key"], "/topics") for one in (former, new)] == [401, 200]
    again = await client.post(f"/api-keys/{former['key_id']}/rotate", json={})
    assert (again.status_code, again.json()["type"]) == (409, "/problems/api-key-over")
    assert (await client.post("/api-keys/1030/rotate", json={})).json()["type"] == "/problems/api-key-unknown"


async def test_a_rotation_puts_no_end_off(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    expires = runtime.clock.now() + timedelta(minutes=5)
    former = await made(client, expires_at=expires.isoformat())
    new = (await client.post(f"/api-keys/{former['key_id']}/rotate", json={})).json()
    shown = (await client.get(f"/api-keys/{former['key_id']}")).json()
    assert new["expires_at"] == shown["expires_at"] == former["expires_at"]


async def test_a_second_rotation_gives_the_end_that_the_key_had_before_the_first(start: Callable[..., Any]) -> None:
    """The answer to the first one was lost."""
    runtime, client = await start()
    now = runtime.clock.now()
    former = await made(client, "producer", producer_groups=["shop"], topics=["order"])
    lost, new = [(await client.post(f"/api-keys/{former['key_id']}/rotate", json={})).json() for _ in range(2)]
    third = (await client.post(f"/api-keys/{new['key_id']}/rotate", json={})).json()
    fourth = (await client.post(f"/api-keys/{former['key_id']}/rotate", json={})).json()
    assert [one["expires_at"] for one in (lost, third, fourth)] == [None] * 3
    runtime.clock.fixed = now + timedelta(hours=25)
    keys = [one["key"] for one in (former, new, third, fourth)]
    assert [await status(client, key, "/topics") for key in keys] == [401, 401, 200, 200]


async def test_a_change_does_not_put_off_the_end_of_a_rotated_key(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    scope = {"role": "producer", "producer_groups": ["shop"], "topics": ["order"]}
    former = await made(client, **scope)
    path = f"/api-keys/{former['key_id']}"
    await client.post(f"{path}/rotate", json={"overlap_s": 600})
    ends = (await client.get(path)).json()["expires_at"]
    later = (runtime.clock.now() + timedelta(days=9)).isoformat()
    for given in ({}, {"expires_at": later}):
        answer = await client.put(path, json={**scope, "name": "other", **given})
        assert (answer.status_code, answer.json()["expires_at"]) == (200, ends)
    earlier = (runtime.clock.now() + timedelta(seconds=60)).isoformat()
    answer = await client.put(path, json={**scope, "name": "other", "expires_at": earlier})
    assert datetime.fromisoformat(answer.json()["expires_at"]) == datetime.fromisoformat(earlier)
    [detail] = await db.fetch("select detail from audit where what = 'api_key.change' order by audit_id limit 1")
    assert json.loads(detail["detail"]) == {"name": "other"}


async def test_the_audit_names_what_a_change_removed(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    expires = (runtime.clock.now() + timedelta(days=1)).isoformat()
    former = await made(client, name="some", expires_at=expires, rate_per_s=1030.0)
    answer = await client.put(f"/api-keys/{former['key_id']}", json={"name": "some", "role": former["role"]})
    assert (answer.status_code, answer.json()["expires_at"]) == (200, None)
    detail = await db.fetchval("select detail from audit where what = 'api_key.change'")
    assert json.loads(detail)["removed"] == ["expires_at", "rate_per_s"]


async def test_last_used_is_noted_once_a_minute(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    key = await made(client)
    now, reader = runtime.clock.now(), LiveSettingsReader()
    noted = "select last_used_at from api_key"
    await reader.step(runtime, now)
    assert await db.fetchval(noted) is None
    for at, expected in ((0, 0), (30, 0), (61, 61)):
        assert await status(client, key["key"]) == 200
        await reader.step(runtime, now + timedelta(seconds=at))
        assert await db.fetchval(noted) == now + timedelta(seconds=expected)


async def test_a_locked_key_delays_no_news_of_others(start: Callable[..., Any], db: Connection) -> None:
    """A frozen session holds the row of a key that was used, and another process revokes another key."""
    runtime, client = await start()
    _, other = await start()
    locked, free, revoked = [await made(client) for _ in range(3)]
    now, reader = runtime.clock.now(), LiveSettingsReader()
    for one in (locked, free, revoked):
        assert await status(client, one["key"]) == 200
    async with asyncio.timeout(30):
        async with db.transaction():
            await db.execute("select from api_key where key_id = $1 for update", locked["key_id"])
            await reader.step(runtime, now)
            assert await db.fetchval("select last_used_at from api_key where key_id = $1", free["key_id"]) == now
            assert (await other.delete(f"/api-keys/{revoked['key_id']}")).status_code == 204
            await reader.step(runtime, now + timedelta(seconds=1))
            assert await status(client, revoked["key"]) == 401
            assert await db.fetchval("select last_used_at from api_key where key_id = $1", locked["key_id"]) is None
        await reader.step(runtime, now + timedelta(seconds=2))
    noted = "select last_used_at from api_key order by key_id"
    assert [row[0] - now for row in await db.fetch(noted)] == [timedelta(seconds=2), timedelta(0), timedelta(0)]


async def test_uses_that_cannot_be_noted_delay_no_news_of_keys(start: Callable[..., Any], db: Connection) -> None:
    runtime, client = await start()
    _, other = await start()
    used, revoked = [await made(client) for _ in range(2)]
    now, reader = runtime.clock.now(), LiveSettingsReader()
    assert await status(client, used["key"]) == 200
    await db.execute("alter table api_key add constraint unused check (last_used_at is null)")
    await reader.step(runtime, now)
    assert (await other.delete(f"/api-keys/{revoked['key_id']}")).status_code == 204
    await reader.step(runtime, now + timedelta(seconds=1))
    assert await status(client, revoked["key"]) == 401
    await db.execute("alter table api_key drop constraint unused")
    later = now + 2 * RETRY_AFTER
    await reader.step(runtime, later)
    assert await db.fetchval("select last_used_at from api_key where key_id = $1", used["key_id"]) == later


@shares
async def test_the_configured_key_cannot_be_chosen_for_another(shared_admin: httpx.AsyncClient) -> None:
    answer = await shared_admin.post("/api-keys", json={"name": "x", "role": "metrics", "key": CONFIGURED})
    assert (answer.status_code, answer.json()["field"]) == (409, "key")


@shares
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": "producer"}, "producer_groups"),
        ({"role": "producer", "producer_groups": ["shop"]}, "topics"),
        ({"role": "subscriber", "topics": ["order"]}, "subscriptions"),
        ({"role": "admin", "topics": ["order"]}, "topics"),
        ({"role": "king"}, "role"),
        ({"role": "producer", "producer_groups": ["a*b"], "topics": ["*"]}, "producer_groups"),
        ({"role": "producer", "producer_groups": ["shop"], "topics": ["a*b"]}, "topics"),
        ({"role": "metrics", "rate_per_s": 0}, "rate_per_s"),
        # The time between two requests would not be a number of seconds that a client can wait.
        ({"role": "metrics", "rate_per_s": 1e-300}, "rate_per_s"),
        ({"role": "metrics", "key": "hn_short"}, "key"),
    ],
)
async def test_an_invalid_key_request_names_its_field(
    shared_admin: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    answer = await shared_admin.post("/api-keys", json={"name": "x", **fields})
    assert answer.status_code == 422
    assert named in answer.json()["field"] + answer.json()["detail"]


def test_the_admins_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{CONFIGURED}\n")
    settings = Settings(_env_file=None, auth="keys", admin_key_file=file)  # type: ignore[call-arg]
    assert settings.given_admin_key() == CONFIGURED
    file.write_text("secret")
    with pytest.raises(BadAdminKeyFile, match="must be `hn_`") as refused:
        settings.given_admin_key()
    assert "secret" not in str(refused.value)
    file.unlink()
    with pytest.raises(BadAdminKeyFile, match="cannot be read"):
        settings.given_admin_key()
    assert CONFIGURED not in repr(Settings(_env_file=None, auth="keys", admin_key=CONFIGURED))  # type: ignore[call-arg,arg-type]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `halfnote` in an environment of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=120)


def test_a_wrong_admin_key_is_not_repeated(tmp_path: Path) -> None:
    refused = run("serve", HALFNOTE_AUTH="keys", HALFNOTE_ADMIN_KEY="s3cret-s3cret")
    assert refused.returncode == 2
    assert "HALFNOTE_ADMIN_KEY: must be `hn_`" in refused.stderr
    assert "s3cret" not in refused.stderr
    none = str(tmp_path / "none")
    refused = run("serve", "--port", str(free_port()), HALFNOTE_AUTH="keys", HALFNOTE_ADMIN_KEY_FILE=none)
    assert refused.returncode == 1
    assert "HALFNOTE_ADMIN_KEY_FILE cannot be read" in refused.stderr


async def test_the_first_key_is_made_beside_the_database(dsn: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn, HALFNOTE_AUTH="keys")
    await service.start()
    try:
        assert "no_admin_key" in service.log.read_text()
        created = run("keys", "create", "--role", "admin", "--name", "dana", "--json", HALFNOTE_DATABASE_URL=dsn)
        assert created.returncode == 0, created.stderr
        key = json.loads(created.stdout)["key"]
        async with httpx.AsyncClient(base_url=service.url, headers=bearer(key)) as client, asyncio.timeout(60):
            while (await client.get("/topics")).status_code != 200:
                await asyncio.sleep(0.05)
            [act] = (await client.get("/audit")).json()["items"]
        assert act["what"] == "api_key.create"
        assert act["actor"].endswith("(command line)")
        asking = {"HALFNOTE_URL": service.url, "HALFNOTE_API_KEY": key}
        made = run("keys", "create", "--role", "producer", "--group", "shop", "--topic", "order", **asking)
        assert made.returncode == 0, made.stderr
        assert "hn_" in made.stdout
        listed = run("keys", "list", **asking)
        assert "groups:" in listed.stdout
        assert "dana" in listed.stdout
        rotated = run("keys", "rotate", "2", "--overlap-s", "60", "--json", **asking)
        assert json.loads(rotated.stdout)["rotated_from"] == 2
        assert run("keys", "revoke", "3", "--yes", **asking).returncode == 0
        assert run("topics", "declare", "order", **asking).returncode == 0
        assert "order" in run("topics", "list", **asking).stdout
        assert run("topics", "undeclare", "order", **asking).returncode == 0
        assert run("audit", **asking).returncode == 0
        audited = json.loads(run("audit", "--what", "api_key.revoke", "--json", **asking).stdout)
        assert [one["target"] for one in audited["items"]] == ["3"]
        for order, key_ids in (("newest", [3, 2, 1]), ("name", [1, 3, 2]), ("used", [1, 3, 2])):
            found = json.loads(run("keys", "list", "--sort", order, "--json", **asking).stdout)
            assert [one["key_id"] for one in found] == key_ids, order
        oldest = json.loads(run("audit", "--sort", "oldest", "--limit", "1", "--json", **asking).stdout)
        assert [one["target"] for one in oldest["items"]] == ["1"]
        refused = run("topics", "list", HALFNOTE_URL=service.url)
        assert refused.returncode == 1
        assert "HALFNOTE_API_KEY" in refused.stderr
        wrong = run("keys", "create", "--role", "producer", HALFNOTE_DATABASE_URL=dsn)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "producer_groups" in wrong.stderr
        assert run("keys", "revoke", "1030", "--yes", HALFNOTE_DATABASE_URL=dsn).returncode == 1
        assert len(json.loads(run("keys", "list", "--json", HALFNOTE_DATABASE_URL=dsn).stdout)) == 3
        assert key[9:] not in service.log.read_text()
    finally:
        service.stop()


async def test_the_start_says_that_auth_is_off(dsn: str, tmp_path: Path) -> None:
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    service.stop()
    assert "auth_off" in service.log.read_text()
