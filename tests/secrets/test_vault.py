"""Secrets at rest: the database stores them sealed, and keys rotate while the service runs."""

import asyncio
import base64
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from alembic import command
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from standardwebhooks import Webhook as Verifier
from structlog.testing import capture_logs

from app.checkback.ping import Pings
from app.config import Settings
from app.database.connection import Connection, UnusableDatabase
from app.errors import SecretsUnreadable
from app.lifecycle.database import prepared_database, refuse_without_keys
from app.loops import gauges
from app.migrate import alembic_config, migrate
from app.operations.secret_rotation import rotate
from app.runtime.state import Runtime
from app.secrets.key_file import LOOK_EVERY_S, BadSecretsKeyFile, make_key_file, new_key, read_keys
from app.secrets.vault import CREDENTIALS, GROUP_SECRETS, SESSION, SUBSCRIPTION_SECRETS, Vault
from app.store.admin import encrypted_secrets
from tests.conftest import client_of, register_group
from tests.routers.test_transactions import subscribe
from tests.support.check_responder import Responder
from tests.support.processes import ROOT
from tests.support.vaults import credentials, group_secrets, subscription_secrets

SECRET = "whsec_" + "S" * 43 + "="
PASSWORD = "a-pass-word-of-the-broker"
TOKEN = "a-token-of-the-receiver"


def key_file(path: Path, *keys: str) -> Path:
    path.write_text("".join(f"{key}\n" for key in keys))
    return path


async def put_all(client: httpx.AsyncClient, url: str = "http://127.0.0.1:9/check") -> None:
    """Register a group, a webhook and a broker, with the secrets of this module."""
    webhook = {"type": "webhook", "url": "http://127.0.0.1:9/in", "secret": SECRET, "headers": {"x-token": TOKEN}}
    broker = {"type": "nats", "url": "nats://127.0.0.1:4222", "username": "us", "password": PASSWORD}
    answers = [
        await client.put("/producer-groups/shop", json={"check_urls": [url], "secret": SECRET}),
        await client.put("/subscriptions/mailer", json={"topics": ["order"], "destination": webhook}),
        await client.put("/subscriptions/stock", json={"topics": ["order"], "destination": broker}),
    ]
    assert [answer.status_code for answer in answers] == [201, 201, 201], [answer.text for answer in answers]


async def dump(db: Connection) -> str:
    """Return every row of every table as text, as a dump of the database has it."""
    tables = [row[0] for row in await db.fetch("select tablename from pg_tables where schemaname = 'public'")]
    assert {"producer_group", "subscription"} <= set(tables)
    rows = [await db.fetch(f'select t::text from "{table}" t') for table in tables]
    return "\n".join(row[0] for row in itertools.chain(*rows))


@pytest.fixture
async def own_keys(
    settings: Settings, runtime: Runtime, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, Path]]:
    """Yield a client of the service and its key file, which only this test uses."""
    path = key_file(tmp_path / "secrets.keys", new_key())
    runtime.vault = Vault(path)
    async with client_of(runtime) as client:
        yield client, path


async def test_no_secret_is_in_the_database_or_in_an_answer_or_in_the_log(
    client: httpx.AsyncClient, db: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    await put_all(client)
    rotated = [
        (await client.post(f"/{path}/rotate-secret")).json()["secret"]
        for path in ("producer-groups/shop", "subscriptions/mailer")
    ]
    texts = [
        (await client.get(f"/{path}")).text for path in ("producer-groups", "subscriptions", "subscriptions/stock")
    ]
    stored_text = await dump(db)
    logged = "".join(capsys.readouterr())
    for secret in (SECRET, PASSWORD, TOKEN, *rotated):
        for text in (stored_text, logged, *texts):
            assert secret not in text
            assert secret.removeprefix("whsec_") not in text
    assert await group_secrets(db) == [rotated[0], SECRET]
    assert await credentials(db, "stock") == {"password": PASSWORD}


async def test_a_sealed_value_opens_only_in_its_own_place(tmp_path: Path) -> None:
    vault = Vault(key_file(tmp_path / "keys", new_key()))
    stored = vault.seal(GROUP_SECRETS, "shop", [{"secret": SECRET, "expires_at": None}])
    assert vault.secrets(GROUP_SECRETS, "shop", stored)[0].secret == SECRET
    assert vault.seal(GROUP_SECRETS, "shop", [{"secret": SECRET, "expires_at": None}]) != stored
    for column, name in ((GROUP_SECRETS, "stock"), (SUBSCRIPTION_SECRETS, "shop"), (CREDENTIALS, "shop")):
        with pytest.raises(SecretsUnreadable, match="copied from another"):
            vault.open(column, name, stored)
    damaged = {**stored, "sealed": stored["sealed"][:-8] + "AAAAAAA="}
    with pytest.raises(SecretsUnreadable):
        vault.open(GROUP_SECRETS, "shop", damaged)
    assert vault.seal(CREDENTIALS, "shop", {}) == {}
    assert vault.open(CREDENTIALS, "shop", {}) == {}


@pytest.mark.parametrize(
    "plain", [[{"secret": SECRET, "expires_at": None}], {"password": PASSWORD}, {"sealed": PASSWORD}]
)
def test_a_value_in_plain_text_is_never_used(tmp_path: Path, plain: Any) -> None:
    with pytest.raises(SecretsUnreadable, match=r"subscription.secrets of `mailer` is stored in plain text") as refused:
        Vault(key_file(tmp_path / "keys", new_key())).open(SUBSCRIPTION_SECRETS, "mailer", plain)
    assert SECRET not in refused.value.detail
    assert PASSWORD not in refused.value.detail


class Time:
    """A clock that stands still until a test sets it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_sent_value_opens_by_the_keys_that_the_file_has_now(tmp_path: Path) -> None:
    time, former, later = Time(), new_key(), new_key()
    path = key_file(tmp_path / "keys", former)
    vault = Vault(path, time)
    sent = vault.seal(SESSION, "cookie", {"token": "t"})
    assert vault.open_sent(SESSION, "cookie", sent) == {"token": "t"}
    key_file(path, later)
    time.now += LOOK_EVERY_S
    with pytest.raises(SecretsUnreadable, match="which the key file lacks"):
        vault.open_sent(SESSION, "cookie", sent)
    # A stored value still opens: an emergency must not stop deliveries before the restart.
    assert vault.open(SESSION, "cookie", sent) == {"token": "t"}
    # What is sealed from now on opens after a restart.
    again = vault.seal(SESSION, "cookie", {"token": "u"})
    assert Vault(path).open(SESSION, "cookie", again) == {"token": "u"}


def test_a_sent_value_with_an_unknown_key_changes_nothing(tmp_path: Path) -> None:
    time, former, later = Time(), new_key(), new_key()
    path = key_file(tmp_path / "keys", former)
    vault = Vault(path, time)
    vault.seal(SESSION, "cookie", {"token": "t"})
    key_file(path, former, later)
    sent = Vault(path).seal(SESSION, "cookie", {"token": "u"})
    # The file is not read for it before a second is over.
    with pytest.raises(SecretsUnreadable, match="which the key file lacks"):
        vault.open_sent(SESSION, "cookie", sent)
    time.now += LOOK_EVERY_S
    assert vault.open_sent(SESSION, "cookie", sent) == {"token": "u"}
    assert vault.seal(SESSION, "cookie", {"token": "v"})["key"] == former.split()[0]


@pytest.mark.parametrize("text", [None, "", "half of a ke"])
def test_a_key_file_that_is_being_replaced_ends_no_session(tmp_path: Path, text: str | None) -> None:
    time = Time()
    path = key_file(tmp_path / "keys", new_key())
    vault = Vault(path, time)
    sent = vault.seal(SESSION, "cookie", {"token": "t"})
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for _ in range(3):
        time.now += LOOK_EVERY_S
        assert vault.open_sent(SESSION, "cookie", sent) == {"token": "t"}
    assert vault.open_sent(SESSION, "cookie", vault.seal(SESSION, "cookie", {"token": "u"})) == {"token": "u"}


def test_sealing_is_aes_gcm_of_256_bits_with_the_place_as_associated_data(tmp_path: Path) -> None:
    key = new_key()
    stored = Vault(key_file(tmp_path / "keys", key)).seal(CREDENTIALS, "stock", {"password": PASSWORD})
    raw, secret = base64.b64decode(stored["sealed"]), base64.b64decode(key.split()[1])
    assert (stored["key"], len(secret)) == (key.split()[0], 32)
    opened = AESGCM(secret).decrypt(raw[:12], raw[12:], b"subscription.credentials:stock")
    assert opened == b'{"password":"%s"}' % PASSWORD.encode()


@pytest.mark.parametrize("text", ["", "# nothing\n", "0123abcd short\n", "no key\n", "\xff"])
def test_a_file_that_is_no_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, "latin-1")
    with pytest.raises(BadSecretsKeyFile):
        read_keys(path)
    with pytest.raises(UnusableDatabase, match="HALFNOTE_SECRETS_KEY_FILE"):
        refuse_without_keys(path)


@pytest.mark.parametrize("between", ["", " "])
def test_two_keys_in_one_line_are_refused_with_the_place_of_the_missing_line_end(tmp_path: Path, between: str) -> None:
    first, second = new_key(), new_key()
    path = key_file(tmp_path / "keys", first + between + second)
    with pytest.raises(BadSecretsKeyFile, match=f"line 1 .* more than one key: put a line end before {second[:8]},"):
        read_keys(path)
    assert read_keys(key_file(path, first, second)).newest == second[:8]


def shell_lines(page: str, with_text: str) -> str:
    """Return the block of shell commands of a page that contains a text, without its indent."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if with_text in block]
    return textwrap.dedent(block)


@pytest.mark.parametrize("ended", [True, False], ids=["as documented", "without its line end"])
def test_the_documented_commands_make_a_key_file_and_append_a_key_to_it(tmp_path: Path, ended: bool) -> None:
    [making] = [line for line in shell_lines("kubernetes.md", "secrets-keys").splitlines() if "secrets-keys" in line]
    appending = shell_lines("operations/secrets.md", "new-secrets-key").replace("secrets.keys", "secrets/secrets-keys")
    halfnote = tmp_path / "halfnote"
    halfnote.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m app.cli "$@"\n')
    halfnote.chmod(0o755)
    (tmp_path / "secrets").mkdir()
    path = tmp_path / "secrets" / "secrets-keys"

    def run(commands: str) -> None:
        env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(["sh", "-e"], input=commands, text=True, cwd=tmp_path, env=env, check=True)

    run(making)
    if not ended:
        path.write_text(path.read_text().rstrip("\n"))
    first = read_keys(path)
    run(appending)
    both = read_keys(path)
    assert len(both.by_id) == 2
    assert first.newest in both.by_id
    assert both.newest != first.newest
    # Without a file, the commands make one.
    path.unlink()
    run(appending)
    assert len(read_keys(path).by_id) == 1


def test_a_new_key_file_is_readable_by_its_owner_only_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secrets.keys"
    make_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    before = read_keys(path).newest
    make_key_file(path)
    assert read_keys(path).newest == before


async def test_an_external_database_is_not_served_without_keys(dsn: str) -> None:
    with pytest.raises(UnusableDatabase, match="halfnote new-secrets-key"):
        async with prepared_database(Settings(_env_file=None, database_url=dsn, secrets_key_file="")):  # type: ignore[call-arg,arg-type]
            raise AssertionError("it was served")


async def test_a_missing_key_is_named_and_a_new_secret_replaces_what_it_sealed(
    own_keys: tuple[httpx.AsyncClient, Path], runtime: Runtime, db: Connection
) -> None:
    client, path = own_keys
    await put_all(client)
    key_text = path.read_text()
    missing, other = key_text.split()[0], new_key()
    runtime.vault = Vault(key_file(path, other))
    before = await dump(db)
    for answer in (
        await client.post("/producer-groups/shop/rotate-secret"),
        await client.post("/subscriptions/stock/test"),
        await client.put(
            "/subscriptions/mailer",
            json={"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/else"}},
        ),
    ):
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/secrets-unreadable")
        assert missing in answer.json()["detail"]
    assert (await client.get("/subscriptions")).status_code == 200
    assert await dump(db) == before
    found = await rotate(db, runtime.vault)
    assert (found.changed, len(found.unreadable)) == (0, 4)
    assert await dump(db) == before
    key_file(path, key_text.strip(), other)
    assert (await client.post("/producer-groups/shop/rotate-secret")).status_code == 200
    key_file(path, other)
    runtime.vault = Vault(path)
    new = SECRET.replace("S", "T")
    # As docs/operations/secrets.md says; all other fields stay.
    again = await client.patch("/producer-groups/shop", json={"secret": new})
    stock = await client.patch("/subscriptions/stock", json={"destination": {"password": "another"}})
    given = {"secret": new, "headers": {"x-token": "another"}}
    mailer = await client.patch("/subscriptions/mailer", json={"destination": given})
    assert [answer.status_code for answer in (again, stock, mailer)] == [200, 200, 200], mailer.text
    assert again.json()["changed"] == ["secret"]
    assert (await client.post("/producer-groups/shop/rotate-secret")).status_code == 200
    assert (await client.post("/subscriptions/mailer/rotate-secret")).status_code == 200
    assert (await rotate(db, runtime.vault)).unreadable == []


async def test_a_key_that_was_added_is_found_without_a_restart(
    own_keys: tuple[httpx.AsyncClient, Path], runtime: Runtime, db: Connection
) -> None:
    client, path = own_keys
    async with Responder() as producer:
        await put_all(client, producer.url)
        first, second = path.read_text().strip(), new_key()
        assert set(await encrypted_secrets.keys_in_use(db)) == {first.split()[0]}
        # Another process rotates; this one has read the file before.
        key_file(path, first, second)
        done = await rotate(db, Vault(path))
        assert (done.key, done.changed, done.unreadable) == (second.split()[0], 3, [])
        assert set(await encrypted_secrets.keys_in_use(db)) == {second.split()[0]}
        assert (await rotate(db, Vault(path))).changed == 0
        assert (await client.post("/producer-groups/shop/test")).status_code == 200
        # The old key is no longer needed.
        key_file(path, second)
        runtime.vault = Vault(path)
        assert (await client.post("/producer-groups/shop/test")).status_code == 200
    assert len(producer.calls) == 2
    for call in producer.calls:
        Verifier(SECRET).verify(call.body, call.headers)


@pytest.mark.parametrize(
    "plain",
    [
        f"""update producer_group set secrets = '[{{"secret": "{SECRET}", "expires_at": null}}]'""",
        f"""update subscription set secrets = '[{{"secret": "{SECRET}", "expires_at": null}}]'""",
        f"""update subscription set credentials = '{{"password": "{PASSWORD}"}}'""",
        f"""update subscription set destination = '{{"type": "webhook", "headers": {{"x-token": "{TOKEN}"}}}}'""",
    ],
)
async def test_the_tables_refuse_plain_text(client: httpx.AsyncClient, db: Connection, plain: str) -> None:
    await put_all(client)
    with pytest.raises(asyncpg.CheckViolationError, match="_sealed"):
        await db.execute(plain)


async def plain_rows(dsn: str, db: Connection) -> None:
    """Downgrade the database to the schema before 0012, and store what `put_all` sends as that version did: in plain
    text."""
    await asyncio.to_thread(command.downgrade, alembic_config(dsn), "0011")
    signing = json.dumps([{"secret": SECRET, "expires_at": None}])
    await register_group(db, "shop", secrets=signing)
    for name, destination, secrets, sent in (
        ("mailer", {"type": "webhook", "url": "http://127.0.0.1:9/in", "headers": {"x-token": TOKEN}}, signing, "{}"),
        ("stock", {"type": "nats", "username": "us"}, "[]", json.dumps({"password": PASSWORD})),
    ):
        await subscribe(db, name, destination=json.dumps(destination), secrets=secrets, credentials=sent)
    await db.execute("update subscription set deleted_at = now() where name = 'stock'")


async def test_migrating_seals_what_an_older_version_stored_in_plain_text(
    dsn: str, db: Connection, tmp_path: Path
) -> None:
    await plain_rows(dsn, db)
    # The older version had already sealed this one.
    await register_group(db, "sealed")
    before = await db.fetchval("select secrets from producer_group where name = 'sealed'")
    await migrate(dsn, days_ahead=1, key_file=Path(os.environ["HALFNOTE_SECRETS_KEY_FILE"]))
    assert await db.fetchval("select secrets from producer_group where name = 'sealed'") == before
    stored_text = await dump(db)
    for secret in (SECRET, PASSWORD, TOKEN):
        assert secret not in stored_text
    assert (await group_secrets(db), await subscription_secrets(db)) == ([SECRET], [SECRET])
    assert await credentials(db) == {"headers": {"x-token": TOKEN}}
    assert await credentials(db, "stock") == {"password": PASSWORD}
    destination = await db.fetchval("select destination from subscription where name = 'mailer'")
    assert json.loads(destination) == {"type": "webhook", "url": "http://127.0.0.1:9/in", "header_names": ["x-token"]}


@pytest.mark.parametrize("text", [None, "0123abcd short\n"])
async def test_migrating_refuses_plain_text_without_a_key_and_says_what_to_do(
    dsn: str, db: Connection, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    await plain_rows(dsn, db)
    before = await dump(db)
    for key_file_ in (None, path):
        with pytest.raises(UnusableDatabase, match=r"1 producer groups and 2 subscriptions .* run `halfnote migrate`"):
            await migrate(dsn, days_ahead=1, key_file=key_file_)
    assert await dump(db) == before


async def test_migrating_by_the_command_seals(dsn: str, db: Connection, tmp_path: Path) -> None:
    await plain_rows(dsn, db)

    def run(key_file: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HALFNOTE_DATABASE_URL": dsn, "HALFNOTE_SECRETS_KEY_FILE": key_file}
        arguments = [sys.executable, "-m", "app.cli", "migrate"]
        return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    refused = await asyncio.to_thread(run, "")
    assert refused.returncode == 1
    assert "HALFNOTE_SECRETS_KEY_FILE is not set" in refused.stderr
    assert "halfnote new-secrets-key" in refused.stderr
    migrated = await asyncio.to_thread(run, os.environ["HALFNOTE_SECRETS_KEY_FILE"])
    assert migrated.returncode == 0, migrated.stderr
    assert await group_secrets(db) == [SECRET]


async def test_readyz_and_metrics_name_missing_keys(
    own_keys: tuple[httpx.AsyncClient, Path], runtime: Runtime, db: Connection
) -> None:
    client, path = own_keys

    async def readiness_and_metric() -> tuple[dict[str, str], float | None]:
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        await gauges.step(runtime, runtime.clock.now())
        value = runtime.metrics.registry.get_sample_value
        warnings = {one["name"]: one["detail"] for one in answer.json()["warnings"] if "secrets" in one["name"]}
        return warnings, value("halfnote_secrets_unreadable")

    await put_all(client)
    assert await readiness_and_metric() == ({}, 0)
    key_text = path.read_text()
    key_file(path, new_key())
    warnings, unreadable = await readiness_and_metric()
    assert key_text.split()[0] in warnings.pop("secrets_unreadable")
    # The secrets of a group and a webhook, the webhook's headers, the broker's password.
    assert (warnings, unreadable) == ({}, 4)
    path.unlink()
    assert (await readiness_and_metric())[1] == 4
    path.write_text(key_text)
    assert await readiness_and_metric() == ({}, 0)


async def test_the_start_logs_missing_keys(dsn: str, db: Connection, tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys", new_key())
    await register_group(db, "shop")
    settings = Settings(_env_file=None, database_url=dsn, secrets_key_file=path)  # type: ignore[call-arg]

    async def logged_at_start() -> dict[str, Any]:
        with capture_logs() as lines:
            async with prepared_database(settings):
                return {line["event"]: line for line in lines}

    [used] = await encrypted_secrets.keys_in_use(db)
    assert (await logged_at_start())["secrets_unreadable"]["key"] == used
    service_keys = Path(os.environ["HALFNOTE_SECRETS_KEY_FILE"]).read_text().strip()
    key_file(path, path.read_text().strip(), service_keys)
    assert "secrets_unreadable" not in await logged_at_start()


async def test_a_ping_reports_the_missing_key_and_other_groups_are_pinged(
    own_keys: tuple[httpx.AsyncClient, Path], runtime: Runtime, db: Connection
) -> None:
    client, path = own_keys
    async with Responder() as producer:
        await put_all(client, producer.url)
        missing = path.read_text().split()[0]
        runtime.vault = Vault(key_file(path, new_key()))
        await client.put("/producer-groups/other", json={"check_urls": [producer.url]})
        await Pings().step(runtime, runtime.clock.now() + timedelta(seconds=1))
        assert len(producer.calls) == 1
    [url] = (await client.get("/producer-groups/shop")).json()["urls"]
    assert missing in url["last_error"]


class Interrupted(Vault):
    """Opens three secrets, then raises as a lost connection does."""

    left = 3

    def open(self, *given: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("interrupted")
        return super().open(*given)


async def test_an_interrupted_rotation_is_continued_and_concurrent_changes_are_not_lost(
    own_keys: tuple[httpx.AsyncClient, Path], db: Connection
) -> None:
    client, path = own_keys
    group = {"check_urls": ["http://127.0.0.1:9/check"], "secret": SECRET}
    for number in range(7):
        assert (await client.put(f"/producer-groups/g{number}", json=group)).status_code == 201
    key_file(path, path.read_text().strip(), new_key())
    with pytest.raises(ConnectionError):
        await rotate(db, Interrupted(path), batch=2)
    assert sorted((await encrypted_secrets.keys_in_use(db)).values()) == [2, 5]
    done, changed = await asyncio.gather(
        rotate(db, Vault(path)), client.put("/producer-groups/g6", json={**group, "immunity_s": 9})
    )
    assert changed.status_code == 200
    assert done.changed == 5
    assert done.unreadable == []
    assert set(await encrypted_secrets.keys_in_use(db)) == {done.key}
    assert (await client.get("/producer-groups/g6")).json()["immunity_s"] == 9


async def test_the_commands_make_a_key_and_rotate(dsn: str, db: Connection, tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys", Path(os.environ["HALFNOTE_SECRETS_KEY_FILE"]).read_text().strip())
    environment = {**os.environ, "HALFNOTE_DATABASE_URL": dsn, "HALFNOTE_SECRETS_KEY_FILE": str(path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "app.cli", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    await register_group(db, "shop")
    printed = (await asyncio.to_thread(run, "new-secrets-key")).stdout
    key_file(path, path.read_text().strip(), printed.strip())
    completed = await asyncio.to_thread(run, "rotate-keys")
    assert (completed.returncode, completed.stdout) == (
        0,
        f"Sealed again by key {printed.split()[0]}: 1. Could not be opened: 0.\n",
    ), completed.stderr
    [done] = await db.fetch("select actor, what, target from audit")
    assert done["actor"].endswith("(command line)")
    assert (done["what"], done["target"]) == ("secrets.rotate", printed.split()[0])
    key_file(path, new_key())
    completed = await asyncio.to_thread(run, "rotate-keys")
    assert completed.returncode == 1
    assert printed.split()[0] in completed.stderr


class Counting(Vault):
    """Counts what it decrypts."""

    decrypted = 0

    def _decrypted(self, *given: Any) -> Any:
        self.decrypted += 1
        return super()._decrypted(*given)


def test_an_opened_value_is_cached(tmp_path: Path) -> None:
    vault = Counting(key_file(tmp_path / "keys", new_key()))
    stored = vault.seal(GROUP_SECRETS, "shop", [{"secret": SECRET, "expires_at": None}])
    for _ in range(1000):
        vault.secrets(GROUP_SECRETS, "shop", dict(stored))
    assert vault.decrypted == 1
