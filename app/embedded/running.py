"""The embedded Postgres as commands beside the service use it: the running one, or one started for their time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psutil

from app.embedded.cluster import DATABASE, USER, read_password
from app.embedded.errors import EmbeddedPostgresError, InUseError
from app.embedded.launcher import EmbeddedPostgres
from app.embedded.place import Place, find_place
from app.embedded.ports import HOST
from app.embedded.survivors import PidFile

# A service that has just taken the cluster may be amid its crash recovery.
_PATIENCE_S = 120.0
_POLL_S = 0.2


@contextmanager
def borrowed(data_dir: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[str]:
    """Yields the url of the database in `data_dir`: its service's, or that of a server started here and stopped after.

    Makes no cluster: raises EmbeddedPostgresError if there is none. A service that runs is not disturbed; one that is
    started meanwhile is refused, as beside any other owner.
    """
    data_dir = data_dir.resolve()
    if not _has_cluster(data_dir):
        raise EmbeddedPostgresError(
            f"There is no database in {data_dir} yet. Start the service once (`halfnote serve`), or say where the "
            "database is by HALFNOTE_DATA_DIR or HALFNOTE_DATABASE_URL."
        )
    deadline = time.monotonic() + patience_s
    while True:
        try:
            server = EmbeddedPostgres.start(data_dir)
        except InUseError:
            url = _url_of_running(find_place(data_dir))
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
    """Looks without making anything, which `find_place` does."""
    return (data_dir / "postgres-location").exists() or (data_dir / "postgres" / "cluster").exists()


def _url_of_running(place: Place) -> str | None:
    """The url of the server that another process owns; None while it does not take connections."""
    try:
        noted, password = PidFile.read(place.pgdata), read_password(place)
    except PermissionError as error:
        raise EmbeddedPostgresError(
            f"The running service's database belongs to another user ({error}). Run this as the service's user."
        ) from error
    if noted is None or noted.status != "ready" or not psutil.pid_exists(noted.pid):
        return None
    return f"postgresql://{USER}:{quote(password, safe='')}@{HOST}:{noted.port}/{DATABASE}"
