"""From the embedded Postgres to one's own, with the commands of docs/operations/own-postgres.md."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import psycopg
import pytest

from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.embedded_postgres.binaries import clean_environment, find_installation
from app.embedded_postgres.initdb import write_settings
from app.embedded_postgres.os_account import account_for
from app.embedded_postgres.paths import find_paths
from app.migrate import migrate
from demo.processes import new_secret
from demo.signature import is_genuine
from tests.support.check_responder import Call, Responder
from tests.support.load import until
from tests.support.postgres_copies import is_true
from tests.support.processes import ROOT, Service, free_port
from tests.support.relay_stepping import order, publish, subscribe

PAGE = ROOT / "docs" / "operations" / "own-postgres.md"
OLD_PROGRAMS = next((path for path in sorted(Path("/usr/lib/postgresql").glob("1[567]/bin"))), None)


def shown(language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@contextmanager
def same_version(directory: Path) -> Iterator[str]:
    """Run a Postgres of the embedded one's version; yield the URL of an administrator."""
    server = EmbeddedPostgres.start(directory)
    try:
        yield server.url
    finally:
        server.stop()


@contextmanager
def older_version(directory: Path) -> Iterator[str]:
    """Run an older Postgres of the system; yield the URL of an administrator."""
    if OLD_PROGRAMS is None:
        pytest.skip("the system has no Postgres older than 18")
    directory.mkdir()
    account, port, password = account_for(directory), free_port(), directory / "password"
    password.write_text("secret")
    for path in (directory, password):
        account.own(path)
    user: Any = {"user": account.uid, "group": account.gid, "extra_groups": account.extra_groups, "cwd": directory}
    data = directory / "data"
    secret = f"--pwfile={password}"
    subprocess.run(
        [OLD_PROGRAMS / "initdb", "-U", "admin", "-A", "scram-sha-256", secret, "-D", data], check=True, **user
    )
    options = f"-p {port} -k '' -h 127.0.0.1"
    command = [OLD_PROGRAMS / "pg_ctl", "-D", data, "-w"]
    subprocess.run([*command, "-l", directory / "log", "-o", options, "start"], check=True, **user)
    try:
        yield f"postgresql://admin:secret@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*command, "-m", "immediate", "stop"], check=True, **user)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """Run a service; yield its client."""
    await service.start()
    try:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            yield client
    finally:
        assert await asyncio.to_thread(service.stop) == 0


async def all_delivered(client: httpx.AsyncClient) -> bool:
    found = (await client.get("/subscriptions/mailer")).json()
    return found["lag"]["messages"] == 0 and found["lag"]["exact"]


def deliveries(receiver: Responder) -> list[Call]:
    """Return what is no look at the check URL."""
    return [call for call in receiver.calls if "ce-id" in call.headers]


def prepare(admin: str, statements: str) -> str:
    """Make a database and its login as the page does; return the login's URL."""
    assert statements.count("'…'") == 1
    with psycopg.connect(admin, autocommit=True) as connection:
        # The embedded Postgres has a superuser and a database of the page's name.
        for statement in re.sub(r"\bhalfnote\b", "own", statements.replace("…", "s3/cret")).split(";")[:-1]:
            connection.execute(statement)  # type: ignore[call-overload]
    return f"postgresql://own:{quote('s3/cret', safe='')}@127.0.0.1:{urlsplit(admin).port}/own"


async def run(commands: str, data_dir: Path, url: str) -> None:
    """Run commands of the page in a directory of its own, with the names of this test."""
    directory = data_dir.parent / "moving"
    directory.mkdir(exist_ok=True)
    passwords = directory / "pgpass"
    passwords.write_text(f"127.0.0.1:{urlsplit(url).port}:*:*:s3/cret\n")
    passwords.chmod(0o600)
    without_password = f"postgresql://own@127.0.0.1:{urlsplit(url).port}/own"
    for name, value in (("DATA", str(data_dir)), ("PYTHON", sys.executable), ("NEW", without_password)):
        commands, count = re.subn(
            rf"^( {{3}}){name}=\S+( \.halfnote\))?", rf"\g<1>{name}={value}", commands, flags=re.MULTILINE
        )
        assert count == 1, name
    environment = {**os.environ, "PGPASSFILE": str(passwords), "PYTHONPATH": str(ROOT)}
    bash: Any = ["bash", "-euo", "pipefail", "-c", commands]
    done = await asyncio.to_thread(
        subprocess.run, bash, cwd=directory, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["same", "older"])
async def test_a_service_moves_from_the_embedded_postgres_and_delivers_as_before(data_dir: Path, version: str) -> None:
    [preparation] = shown("sql")
    names, dump, load, without_new_settings, *_ = shown("sh")
    steps = [names, dump, *([without_new_settings] if version == "older" else []), load]
    target = (same_version if version == "same" else older_version)(data_dir.parent / "target")
    key_file, secret = data_dir.parent / "moved.keys", new_secret()
    async with Responder(status=200) as receiver:
        async with serving(Service(data_dir, "serve")) as client:
            await client.put("/producer-groups/shop", json={"check_urls": [receiver.url]})
            destination = {"type": "webhook", "url": receiver.url, "secret": secret}
            await subscribe(client, receiver, destination=destination, retry=[1] * 100)
            [first] = await publish(client, order(1029))
            await until(lambda: all_delivered(client))
            receiver.status = 503
            [waiting] = await publish(client, order(1030))
            await until(lambda: len(deliveries(receiver)) > 1)
        with target as admin:
            url = await asyncio.to_thread(prepare, admin, preparation)
            await run("\n".join(steps), data_dir, url)
            shutil.copy(data_dir / "secrets.keys", key_file)
            data_dir.rename(data_dir.with_name("halfnote.moved"))
            receiver.calls.clear()
            receiver.status = 200
            settings = {"HALFNOTE_DATABASE_URL": url, "HALFNOTE_SECRETS_KEY_FILE": str(key_file)}
            async with serving(Service(data_dir, "serve", **settings)) as client:
                await until(lambda: deliveries(receiver))
                [last] = await publish(client, order(1031))
                await until(lambda: is_true(url, "select count(*) = 3 from receipt"))
    assert [call.json()["order"] for call in deliveries(receiver)] == [1030, 1031]
    assert all(is_genuine(secret, call.headers, call.body) for call in deliveries(receiver))
    assert first < waiting < last
    assert not data_dir.exists()


@contextmanager
def made_by_16(data_dir: Path) -> Iterator[str]:
    """Run a Postgres 16 of the wheel over a data directory of Halfnote; yield its URL."""
    programs = find_installation().root.with_name("pginstall") / "bin"
    paths = find_paths(data_dir)
    paths.cluster.mkdir(mode=0o700)
    paths.log.mkdir(mode=0o700)
    port = free_port()
    (paths.cluster / "password").write_text("s3cret")
    (paths.home / "port").write_text(f"{port}\n")
    for path in (paths.cluster, paths.log, paths.cluster / "password"):
        paths.account.own(path)
    account: Any = {"user": paths.account.uid, "group": paths.account.gid, "extra_groups": paths.account.extra_groups}
    login = ["-U", "halfnote", "-A", "scram-sha-256", f"--pwfile={paths.cluster / 'password'}"]
    initdb = [programs / "initdb", *login, "--encoding=UTF8", "--locale=C", "-D", paths.pgdata]
    subprocess.run(initdb, check=True, cwd=paths.home, env=clean_environment(), **account)
    write_settings(paths, port, {})
    with (paths.pgdata / "postgresql.conf").open("a") as file:
        file.write("\ninclude '../../halfnote.conf'\n")
    command = [programs / "pg_ctl", "-D", paths.pgdata, "-w", "-l", "/dev/null"]
    subprocess.run([*command, "start"], check=True, cwd=paths.home, env=clean_environment(), **account)
    try:
        url = f"postgresql://halfnote:s3cret@127.0.0.1:{port}"
        with psycopg.connect(f"{url}/postgres", autocommit=True) as connection:
            connection.execute("create database halfnote")
        yield f"{url}/halfnote"
    finally:
        subprocess.run([*command, "stop"], check=True, cwd=paths.home, env=clean_environment(), **account)


async def test_a_cluster_of_another_version_moves_into_an_empty_data_directory(data_dir: Path) -> None:
    names, dump, load, _, wheel, into = shown("sh")
    assert "pip install" in wheel
    # The wheel that is installed here has the same programs.
    server = f"SERVER={find_installation().root.with_name('pginstall') / 'bin'}"
    new = data_dir.with_name("halfnote-new")
    async with Responder(status=503) as receiver:
        with made_by_16(data_dir) as url:
            await migrate(url, days_ahead=2)
            async with serving(Service(data_dir, "serve", HALFNOTE_DATABASE_URL=url)) as client:
                await client.put("/producer-groups/shop", json={"check_urls": [receiver.url]})
                await subscribe(client, receiver, retry=[1] * 100)
                await publish(client, order(1030))
        with pytest.raises(EmbeddedPostgresError, match="made by Postgres 16"):
            EmbeddedPostgres.start(data_dir)
        async with serving(Service(new, "serve")):
            shutil.copy(os.environ["HALFNOTE_SECRETS_KEY_FILE"], new / "secrets.keys")
        stop = '$AS "$BIN/pg_ctl" --pgdata "$FROM/cluster/data" --mode fast stop'
        into = into.replace(".halfnote-new", str(new))
        await run("\n".join([names, server, dump, into, load, stop]), data_dir, "postgresql://127.0.0.1:1")
        receiver.calls.clear()
        receiver.status = 200
        async with serving(Service(new, "serve")) as client:
            await until(lambda: all_delivered(client))
    assert [call.json()["order"] for call in deliveries(receiver)] == [1030]
