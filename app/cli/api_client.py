"""Call the service over HTTP, and print its problems."""

import json
import os
import re
import socket
import ssl
import sys
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from app.cli.errors import WRONG_USAGE, Refusal, Unavailable
from app.permissions import SHOWN_CHARACTERS

DEFAULT_URL = "http://127.0.0.1:8080"
# A test of a callback may take its whole timeout.
TIMEOUT_S = 60.0
# Answers of the service, or of a proxy before it, after which the same call may succeed; the longest `Retry-After`.
BUSY = (429, 502, 503, 504)
RETRY_AFTER_MOST_S = 60
# The API's limit of one page.
PAGE_MAX = 1000

NO_KEY = "\n  This command sends the key that is in HALFNOTE_API_KEY."

NOT_TEXT = "An argument, or a text of the request, is not text in UTF-8. Nothing was sent."

_names_user = re.compile(r"([^/?#]*//)?[^/?#]*@").match


def _checked_url(url: str) -> str:
    """Return the URL of the service. Raises Refusal for one that names a user, which would be sent instead of the key.

    The error leaves out the URL: it may have a password.
    """
    if _names_user(url):
        raise Refusal(
            "The URL of --url or HALFNOTE_URL names a user. Leave out everything up to the `@`: commands send the key "
            "in HALFNOTE_API_KEY.",
            code=WRONG_USAGE,
        )
    if not url.isprintable():
        raise Refusal(
            "The URL of --url or HALFNOTE_URL has a control character, or is not text in UTF-8.", code=WRONG_USAGE
        )
    return url


Url = Annotated[str, typer.Option(envvar="HALFNOTE_URL", help="the URL of Halfnote", callback=_checked_url)]
AsJson = Annotated[bool, typer.Option("--json", help="print the API's JSON instead of a table")]
FromFile = Annotated[
    Path | None, typer.Option("--file", help="JSON of the whole request, `-` for stdin; options override its fields")
]


def call(
    url: str,
    method: str,
    path: str,
    *,
    query: dict[str, Any] | None = None,
    content: dict[str, Any] | None = None,
    as_json: bool = False,
) -> Any:
    """Return the decoded answer, or None if it is empty. Raises Refusal for a problem or without an answer, and for
    what cannot be sent; Unavailable, which is a Refusal, if the same call may succeed later.

    With `as_json` a problem is also printed on stdout as the API answered it.
    """
    parameters = {name: value for name, value in (query or {}).items() if value is not None}
    body = None if content is None else encoded(content)
    headers = _key() if body is None else {**_key(), "content-type": "application/json"}
    try:
        # No proxy from the environment: the service is on this machine or in this network.
        with httpx.Client(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, headers=headers, verify=trusted(url)
        ) as client:
            answer = client.request(method, path, params=parameters, content=body)
    except UnicodeEncodeError:
        # Of the query: the rest was checked.
        raise Refusal(NOT_TEXT, code=WRONG_USAGE) from None
    except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise _no_answer(url, error) from None
    except httpx.HTTPError as error:
        raise Unavailable(f"{url} did not answer {method} {path}: {error or type(error).__name__}.") from None
    if answer.is_error:
        if as_json:
            print(answer.text)
        raise _refusal(url, answer)
    if not answer.is_success:
        there = answer.headers.get("location", "another address")
        raise Refusal(f"{url} answered {answer.status_code} and redirects to {there}. Set that address as the URL.")
    try:
        return answer.json() if answer.content else None
    except ValueError:
        raise Refusal(problem_text(url, answer)) from None


def stream_lines(url: str, path: str, headers: dict[str, str]) -> Iterator[str]:
    """Yield the lines of an answer that has no end. Raises Refusal; httpx.HTTPError if it breaks off."""
    try:
        with (
            httpx.Client(
                base_url=url, timeout=TIMEOUT_S, trust_env=False, headers={**_key(), **headers}, verify=trusted(url)
            ) as client,
            client.stream("GET", path) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise _refusal(url, answer)
            yield from answer.iter_lines()
    except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise _no_answer(url, error) from None


def _no_answer(url: str, error: Exception) -> Refusal:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Refusal(
            f"The certificate of {url} is not trusted ({error}).\n"
            "  Name the PEM file of your CA by HALFNOTE_CA_FILE, and a host of the certificate in the URL."
        )
    text = (
        f"No Halfnote answers on {url} ({error}).\n"
        "  Start it with `make run` or `halfnote serve`, or set its address with --url or HALFNOTE_URL."
    )
    if not isinstance(error, httpx.ConnectError):
        return Refusal(text)
    return Unavailable(text, is_address=_is_of_address(error))


def _is_of_address(error: BaseException | None) -> bool:
    """Return whether a connection failed at the lookup of the host's name, or at TLS."""
    while error is not None:
        if isinstance(error, socket.gaierror | ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refusal(url: str, answer: httpx.Response) -> Refusal:
    hint = NO_KEY if answer.status_code == 401 else ""
    text, problem = problem_text(url, answer) + hint, _problem(answer)
    if answer.status_code not in BUSY:
        return Refusal(text, problem=problem)
    return Unavailable(text, problem=problem, retry_after_s=_seconds(answer.headers.get("retry-after", "")))


def _seconds(text: str) -> float:
    return float(min(int(text), RETRY_AFTER_MOST_S)) if text.isascii() and text.isdecimal() else 0.0


def _problem(answer: httpx.Response) -> dict[str, Any]:
    try:
        read = answer.json()
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def trusted(url: str) -> ssl.SSLContext | bool:
    """Return the context for https: public CAs, or those of SSL_CERT_FILE, and those of HALFNOTE_CA_FILE."""
    if not url.lower().startswith("https:"):
        return True
    context = httpx.create_ssl_context()
    if file := os.environ.get("HALFNOTE_CA_FILE"):
        try:
            context.load_verify_locations(file)
        except OSError as error:
            reason = error.strerror or error
            raise Refusal(f"HALFNOTE_CA_FILE: {file} is no readable PEM file of CAs: {reason}.", code=2) from None
    return context


def encoded(content: dict[str, Any]) -> bytes:
    """Return a request's content as JSON. Raises Refusal for text that is not UTF-8 and numbers that JSON lacks."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise Refusal(NOT_TEXT, code=WRONG_USAGE) from None
    except ValueError:
        infinite = (name for name, value in content.items() if isinstance(value, float) and not isfinite(value))
        named = next((f"`{name}` is no number" for name in infinite), "A value of the request is no number")
        raise Refusal(f"{named} of JSON: it is nan or infinite. Nothing was sent.", code=WRONG_USAGE) from None


def own_key() -> str | None:
    """Return the key in HALFNOTE_API_KEY, or None. Raises Refusal for one that no header can contain.

    From the environment only: every user of the machine can read a command's arguments.
    """
    key = os.environ.get("HALFNOTE_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        # The error leaves out the key.
        raise Refusal(
            "HALFNOTE_API_KEY has a character that no key has: a key is ASCII on one line. Copy it again.",
            code=WRONG_USAGE,
        )
    return key or None


def _key() -> dict[str, str]:
    key = own_key()
    return {"authorization": f"Bearer {key}"} if key else {}


def caller_prefix() -> str | None:
    """Return the characters that lists show of the key in HALFNOTE_API_KEY, or None. Raises Refusal."""
    return (own_key() or "")[:SHOWN_CHARACTERS] or None


def path_of(*parts: str) -> str:
    """Return a path of the API. Raises Refusal for a name that no path can contain."""
    for part in parts:
        try:
            part.encode()
        except UnicodeEncodeError:
            raise Refusal(NOT_TEXT, code=WRONG_USAGE) from None
        if part in ("", ".", "..") or "/" in part:
            raise Refusal(
                f"`{part}` is not a name: a name has 1 to 255 characters, no `/`, and is not `.` or `..`.",
                code=WRONG_USAGE,
            )
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def problem_text(url: str, answer: httpx.Response) -> str:
    """Return a problem as text: title, detail, its other fields, and the URL that explains its type."""
    try:
        problem = answer.json()
        lines = [f"{problem['title']} ({answer.status_code})", problem["detail"]]
    except (ValueError, KeyError, TypeError):
        return f"{url} answered {answer.status_code}, and not as Halfnote does. Is it the right address?"
    more = {name: value for name, value in problem.items() if name not in ("type", "title", "status", "detail")}
    lines += [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in more.items()]
    lines.append(f"type: {httpx.URL(url).join(problem['type'])}")
    return "\n  ".join(lines)


def request_of(file: Path | None, **options: Any) -> dict[str, Any]:
    """Return a request's content: the file's, overridden by the given options. Raises Refusal."""
    content = {} if file is None else json_object_of(file)
    return content | {name: value for name, value in options.items() if value is not None and value != []}


def json_object_of(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file, or of stdin for `-`. Raises Refusal."""
    try:
        read = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"{file} cannot be read as JSON: {error}", code=2) from None
    if not isinstance(read, dict):
        raise Refusal(f"{file} is not a JSON object.", code=2)
    return read


def all_pages(url: str, path: str, *, as_json: bool, cursor: str | None = None, **query: Any) -> list[dict[str, Any]]:
    """Return the items of all pages of a list from `cursor` on. Raises Refusal."""
    found: list[dict[str, Any]] = []
    while True:
        page = call(url, "GET", path, query={**query, "cursor": cursor, "limit": PAGE_MAX}, as_json=as_json)
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def list_items(url: str, path: str, query: dict[str, Any], limit: int, *, as_json: bool) -> dict[str, Any]:
    """Return up to `limit` items of a list and where it continues, from as many pages as needed.

    With `count` in the query also `total`, how many the whole list has.
    """
    found: list[dict[str, Any]] = []
    cursor = query.get("cursor")
    total: dict[str, Any] = {}
    # A page of the API may hold fewer than it was asked for.
    while True:
        asked = {**query, "limit": min(limit - len(found), PAGE_MAX), "cursor": cursor}
        page = call(url, "GET", path, query=asked, as_json=as_json)
        found += page["items"]
        cursor = page["next_cursor"]
        if query.get("count"):
            # Once is enough.
            total, query = {"total": page["total"]}, {**query, "count": None}
        if cursor is None or len(found) >= limit:
            return {"items": found, "next_cursor": cursor, **total}


def print_json(answer: Any) -> None:
    """Print an answer for machines, as JSON indented by two."""
    print(json.dumps(answer, indent=2, ensure_ascii=False))
