"""Give commands the embedded Postgres: the running service's server, or one that is started for the command."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import psutil

from app.embedded_postgres.errors import EmbeddedPostgresError, InUseError
from app.embedded_postgres.foreign import refuse_foreign
from app.embedded_postgres.initdb import DATABASE, USER, read_password
from app.embedded_postgres.paths import ServerPaths, find_paths
from app.embedded_postgres.ports import HOST
from app.embedded_postgres.server import EmbeddedPostgres
from app.embedded_postgres.stale_processes import PidFile

# A service that has just started may still be in crash recovery.
_PATIENCE_S = 120.0
_POLL_S = 0.2


@contextmanager
def borrowed(data_dir: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[str]:
    """Yield the URL of the database in `data_dir`: the running service's, or of a server started for the block.

    Makes no cluster: raises EmbeddedPostgresError if there is none. A running service is not disturbed. A service that
    is started meanwhile is refused, as with any other owner.
    """
    data_dir = data_dir.resolve()
    if not _has_cluster(data_dir):
        with suppress(PermissionError):
            refuse_foreign(data_dir)
        raise EmbeddedPostgresError(
            f"There is no database in {data_dir} yet. Start the service once (`halfnote serve`), or name the "
            "database with HALFNOTE_DATA_DIR or HALFNOTE_DATABASE_URL."
        )
    deadline = time.monotonic() + patience_s
    while True:
        try:
            server = EmbeddedPostgres.start(data_dir)
        except InUseError:
            url = _url_of_running(find_paths(data_dir))
            if url is None and time.monotonic() > deadline:
                raise
        else:
            try:
                yield server.url
            finally:
                server.stop()
            return
        if url is not None:
            yield url
            return
        time.sleep(_POLL_S)


def _has_cluster(data_dir: Path) -> bool:
    """Return whether there is a cluster, without making anything, unlike `find_paths`."""
    return (data_dir / "postgres-location").exists() or (data_dir / "postgres" / "cluster").exists()


def _url_of_running(paths: ServerPaths) -> str | None:
    """Return the URL of the server that another process owns; None while it takes no connections."""
    try:
        noted, password = PidFile.read(paths.pgdata), read_password(paths)
    except PermissionError as error:
        raise EmbeddedPostgresError(
            f"The running service's database belongs to another user ({error}). Run this as the service's user."
        ) from error
    if noted is None or noted.status != "ready" or not psutil.pid_exists(noted.pid):
        return None
    return f"postgresql://{USER}:{quote(password, safe='')}@{HOST}:{noted.port}/{DATABASE}"
