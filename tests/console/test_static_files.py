"""The files that the console serves: what was taken from where, and how large it is."""

import gzip
import json
from hashlib import sha256

import httpx
import pytest

from app.console.static_files import FOLDER, TYPES, static_file

# Swagger UI is for the page `/docs` alone.
OF_API_DOCS = {"swagger-ui-bundle.js", "swagger-ui.css", "api-docs.js"}
OWN = {"console.css", "console.js", "api-docs.js", "icon.svg"}
BUDGET_BYTES = 60_000


def test_vendored_files_are_those_of_the_lock() -> None:
    lock = json.loads((FOLDER / "vendored.json").read_text())
    for one in lock:
        assert sha256((FOLDER / one["file"]).read_bytes()).hexdigest() == one["sha256"], one["file"]
        assert one["version"]
        assert (FOLDER / one["license_file"]).stat().st_size > 100
    served = {file.name for file in FOLDER.iterdir() if file.suffix in TYPES}
    assert served == OWN | {one["file"] for one in lock}


def test_scripts_and_styles_are_small() -> None:
    names = [file.name for file in FOLDER.iterdir() if file.suffix in TYPES and file.name not in OF_API_DOCS]
    sizes = {name: len(static_file(name).compressed) for name in names}
    assert sum(sizes.values()) <= BUDGET_BYTES, sizes
    assert gzip.decompress(static_file("console.js").compressed) == static_file("console.js").body


@pytest.mark.parametrize(
    "name", ["x" * 260 + ".js", "..%2fpage.py", "", "nothing.css", "licenses", "%00.js", "a" * 5000]
)
async def test_there_are_no_other_files(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/console/static/{name}")
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
