"""The console's scripts and styles, from memory, compressed, and cached by browsers under the hash of their content."""

import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from app.errors import NotFound

PREFIX = "/console/static/"
FOLDER = Path(__file__).with_name("static")
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file with its compressed form."""

    media_type: str
    version: str
    body: bytes
    compressed: bytes


@cache
def _paths() -> dict[str, Path]:
    return {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES and path.is_file()}


@cache
def static_file(name: str) -> StaticFile:
    """Return a file of the console by its name. Raises NotFound."""
    # A name of a request never reaches the file system, which refuses long ones with an error of its own.
    path = _paths().get(name)
    if path is None:
        raise NotFound("The console has no such file.")
    body = path.read_bytes()
    return StaticFile(TYPES[path.suffix], sha256(body).hexdigest()[:12], body, gzip.compress(body, 9, mtime=0))


def url_of(name: str) -> str:
    """Return the URL of a file, which changes with its content."""
    return f"{PREFIX}{name}?v={static_file(name).version}"


def answer(request: Request) -> Response:
    """Return the file that a request asks for. Raises NotFound."""
    file = static_file(request.scope["path"].removeprefix(PREFIX))
    is_current = request.query_params.get("v") == file.version
    if request.headers.get("if-none-match") == f'"{file.version}"':
        return Response(status_code=304)
    headers = {
        "etag": f'"{file.version}"',
        "cache-control": "public, max-age=31536000, immutable" if is_current else "no-cache",
        "x-content-type-options": "nosniff",
        "vary": "accept-encoding",
    }
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, media_type=file.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(file.body, media_type=file.media_type, headers=headers)
