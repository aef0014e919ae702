"""A real pgbouncer before the tests' Postgres, on a free port, with the defaults of its package."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from app.embedded_postgres.os_account import account_for
from tests.support.brokers import free_ports
from tests.support.requirements import absent

Mode = Literal["session", "transaction", "statement"]

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
START_WITHIN_S = 60.0
INI = """
[databases]
* = host={host} port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
pool_mode = {mode}
default_pool_size = 40
"""


@contextlib.contextmanager
def pooling(dsn: str, mode: Mode) -> Iterator[str]:
    """Yield the url of a database behind a pgbouncer in a pool mode, otherwise with its defaults; skips without one."""
    program = shutil.which("pgbouncer", path=PATH)
    if program is None:
        absent("pgbouncer is not installed here: make test-deps", "DEPS")
    directory = Path(tempfile.mkdtemp(prefix="halfnote-pgbouncer-"))
    # pgbouncer does not run as root.
    account = account_for(directory)
    account.own(directory)
    url = urlsplit(dsn)
    [port] = free_ports(1)
    users = directory / "users"
    users.write_text(f'"{url.username}" "{unquote(url.password or "")}"\n')
    settings = directory / "pgbouncer.ini"
    settings.write_text(INI.format(host=url.hostname, server=url.port, port=port, users=users, mode=mode))
    for file in (users, settings):
        account.own(file)
    as_user: dict[str, Any] = (
        {} if account.uid is None else {"user": account.uid, "group": account.gid, "extra_groups": []}
    )
    with (directory / "log").open("wb") as log:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [str(program), str(settings)], stdout=log, stderr=log, cwd="/", **as_user
        )
    try:
        _listens(process, port, directory / "log")
        login = url.netloc.rpartition("@")[0]
        yield urlunsplit(url._replace(netloc=f"{login}@127.0.0.1:{port}"))
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


def _listens(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"pgbouncer did not start: {log.read_text()}")
