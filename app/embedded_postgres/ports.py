"""The server's port: the same as in the last run if possible."""

import os
import socket
from pathlib import Path

HOST = "127.0.0.1"


def remember_port(home: Path, port: int) -> None:
    """Store the port for the next start, so that the database's URL stays the same."""
    (home / "port").write_text(f"{port}\n")


def remembered_port(home: Path) -> int | None:
    """Return the port of the last run if it is free, else None."""
    remembered = home / "port"
    text = remembered.read_text().strip() if remembered.exists() else ""
    return int(text) if text.isdigit() and is_free(int(text)) else None


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port at the moment."""
    with socket.socket() as probe:
        if os.name == "posix":
            # As Postgres does, so that connections in TIME_WAIT do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
