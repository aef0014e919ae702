"""Prepare the database before a process serves: check the user's own, or start, migrate and watch the embedded one."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import structlog

from app.config import Settings
from app.database.connection import Database, UnusableDatabase, connect, refuse_unusable
from app.embedded_postgres import EmbeddedPostgres
from app.migrate import current, head, migrate, refuse_newer, serves
from app.operations.secret_rotation import Rotation, rotate
from app.permissions import Caller
from app.policy.server_restarts import LONGEST_WAIT_S, wait_s
from app.runtime.loop_runner import wait
from app.secrets.key_file import BadSecretsKeyFile, make_key_file, read_keys
from app.secrets.status import missing_keys
from app.secrets.vault import Vault
from app.store.admin.encrypted_secrets import keys_in_use

log = structlog.get_logger(__name__)


WATCH_EVERY_S = 1.0
# `halfnote serve`, which starts the embedded server, tells its processes in it where the cluster is.
HOME_VARIABLE = "HALFNOTE_EMBEDDED_POSTGRES_HOME"


class PreparedDatabase(NamedTuple):
    """A database that can be served: its URL, and the directory of the embedded server; None if it is the user's."""

    url: str
    home: Path | None


async def refuse_behind(dsn: str) -> None:
    """Raise UnusableDatabase unless the database is at this version's schema, or at a later one that serves it."""
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as connection:
            revision = await current(connection)
            served = await serves(connection, revision)
    finally:
        await database.close()
    if not served:
        refuse_newer(revision)
        raise UnusableDatabase(
            f"The database is at revision {revision or 'none'}; this version of Halfnote needs {head()}. "
            "Run `halfnote migrate` with the same HALFNOTE_DATABASE_URL, then start again."
        )


@asynccontextmanager
async def prepared_database(settings: Settings) -> AsyncIterator[PreparedDatabase]:
    """Yield the database: the user's own, checked, or the embedded one, started, migrated and watched.

    Raises UnusableDatabase or EmbeddedPostgresError, whose text says what to do.
    """
    if settings.database_url:
        await refuse_unusable(settings.database_url)
        await refuse_behind(settings.database_url)
        refuse_without_keys(settings.key_file)
        await _log_missing_keys(settings.database_url, settings.key_file)
        home = os.environ.get(HOME_VARIABLE)
        yield PreparedDatabase(settings.database_url, Path(home) if home else None)
        return
    server = await _embedded(settings.data_dir)
    stopping = asyncio.Event()
    watcher = asyncio.create_task(watch(server, stopping))
    try:
        revision = await migrate_embedded(server.url, settings)
        if revision != head():
            log.warning("schema_is_later", revision=revision, needed=head())
        await _log_missing_keys(server.url, settings.key_file)
        yield PreparedDatabase(server.url, server.home)
    finally:
        stopping.set()
        await watcher
        await asyncio.to_thread(server.stop)


async def migrate_embedded(dsn: str, settings: Settings, by: Caller | None = None) -> str:
    """Migrate the embedded database; make its key file first unless there is one. Arguments and result: see `migrate`.

    Raises UnusableDatabase if the key file is unusable or cannot be made, or if there is none and the database has
    sealed secrets: a new key would not open them.
    """
    if settings.key_file is not None and not _exists(settings.key_file):
        await _refuse_sealed(dsn, settings.key_file)
        _make_key_file(settings.key_file)
    refuse_without_keys(settings.key_file)
    return await migrate(dsn, days_ahead=settings.days_ahead, key_file=settings.key_file, by=by)


def _exists(path: Path) -> bool:
    """Return whether the key file is there. Raises UnusableDatabase if that cannot be known."""
    try:
        return path.exists()
    except OSError as error:
        raise UnusableDatabase(f"HALFNOTE_SECRETS_KEY_FILE: {path} cannot be read: {error.strerror}.") from None


def _make_key_file(path: Path) -> None:
    """Make the key file. Raises UnusableDatabase."""
    try:
        make_key_file(path)
    except OSError as error:
        raise UnusableDatabase(
            f"HALFNOTE_SECRETS_KEY_FILE: the key file {path} cannot be made: {error.strerror}. Make its directory, and "
            "let Halfnote write there, or name another file."
        ) from None


def refuse_without_keys(key_file: Path | None) -> None:
    """Raise UnusableDatabase unless the key file has a key that seals secrets."""
    if key_file is None:
        raise UnusableDatabase(
            "HALFNOTE_SECRETS_KEY_FILE is not set. The keys of that file seal webhooks' secrets and brokers' passwords "
            "in the database. Make one file for all replicas, let only the service read it, and keep a copy apart from "
            "the database's backups: `(umask 077; halfnote new-secrets-key >> secrets.keys)`"
        )
    try:
        read_keys(key_file)
    except BadSecretsKeyFile as error:
        raise UnusableDatabase(
            f"HALFNOTE_SECRETS_KEY_FILE: {error}. `halfnote new-secrets-key` prints a key."
        ) from None


async def _refuse_sealed(dsn: str, key_file: Path) -> None:
    """Raise UnusableDatabase if the database has sealed secrets; `key_file` is the missing file."""
    connection = await connect(dsn)
    try:
        # The embedded server's new database has no tables yet.
        if await connection.fetchval("select to_regclass('subscription')") is None:
            return
        used = await keys_in_use(connection)
    finally:
        await connection.close()
    if used:
        raise UnusableDatabase(
            f"The key file {key_file} is missing, and it sealed {sum(used.values())} secrets of the database: put the "
            "file back, or set HALFNOTE_SECRETS_KEY_FILE to its new place, or, if every copy is lost, make another "
            f"with `(umask 077; halfnote new-secrets-key > {key_file})` and set these secrets again "
            "(docs/operations/secrets.md)."
        )


async def rotate_secret_keys(dsn: str, key_file: Path | None, by: Caller | None = None) -> Rotation:
    """Seal a database's secrets by the newest key of the file. `by`: the person who rotates, for the audit.

    Raises SecretsUnreadable if the key file is unusable.
    """
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as connection:
            return await rotate(connection, Vault(key_file), by=by)
    finally:
        await database.close()


async def _log_missing_keys(dsn: str, key_file: Path | None) -> None:
    """Log each key that sealed secrets and that the file lacks."""
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as connection:
            missing = await missing_keys(connection, Vault(key_file))
    finally:
        await database.close()
    for key, columns in missing.items():
        log.error("secrets_unreadable", key=key, columns=columns, key_file=str(key_file))


async def _embedded(data_dir: Path) -> EmbeddedPostgres:
    """Start the embedded server; stop it again if the start is interrupted."""
    interrupted = threading.Event()

    def start() -> EmbeddedPostgres:
        server = EmbeddedPostgres.start(data_dir)
        if interrupted.is_set():
            server.stop()
        return server

    try:
        return await asyncio.to_thread(start)
    except asyncio.CancelledError:
        # A thread cannot be canceled. The process waits for its end.
        interrupted.set()
        raise


async def watch(server: EmbeddedPostgres, stopping: asyncio.Event) -> None:
    """Restart the embedded server after it died. The commit lanes and the pool reconnect by themselves.

    A server that cannot start, as on a full disk, is restarted ever more rarely; one that dies again, a little later.
    """
    tried_at, retry_s, died = -inf, 0.0, False
    while True:
        await wait(WATCH_EVERY_S, stopping, None)
        if stopping.is_set():
            return
        if server.alive():
            died = False
            if monotonic() - tried_at > LONGEST_WAIT_S:
                retry_s = 0.0
            continue
        if not died:
            died = True
            log.warning("embedded_postgres_died")
        if monotonic() - tried_at < retry_s:
            continue
        try:
            await asyncio.to_thread(server.restart)
            died, retry_s = False, wait_s(retry_s, started=True)
            log.info("embedded_postgres_restarted")
        except Exception as error:
            retry_s = wait_s(retry_s, started=False)
            log.error("embedded_postgres_not_restarted", error=str(error), retry_s=retry_s)
        tried_at = monotonic()
