"""An ASGI app for tests of the processes that serve: its event loop can be blocked, and its end can be held up.

`POST /block?FILE` blocks the event loop until the file is there. With STOPS_WITH in the environment the end waits for
that file. The app makes a file with the suffix `.waits` beside it as soon as it waits.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

STOPS_WITH = "TESTS_STOPS_WITH"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer with the id of this process."""
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    if scope["path"] == "/block":
        file = Path(unquote(scope["query_string"].decode()))
        waits(file).touch()
        while not file.exists():
            # A fault that blocks the event loop.
            time.sleep(0.01)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


def waits(file: Path) -> Path:
    """Return the file that is there as soon as the app waits for `file`."""
    return file.with_suffix(".waits")


async def _live(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    named = os.environ.get(STOPS_WITH)
    if named:
        file = Path(named)
        waits(file).touch()
        while not file.exists():
            await asyncio.sleep(0.01)
    await send({"type": "lifespan.shutdown.complete"})
