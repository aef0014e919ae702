"""Cookies of the console, sealed by the key file of the secrets: every process of the service can open them."""

from collections.abc import Iterator
from typing import Any, Literal

from starlette.types import Scope

from app.errors import SecretsUnreadable
from app.runtime.state import Runtime
from app.secrets.vault import Column

# The row that the ciphertext is bound to.
_NAME = "cookie"


def value_of(runtime: Runtime, scope: Scope, name: str, column: Column) -> Any:
    """Return the value that a request's cookie holds; None if there is none, or if it does not open."""
    opened = (_opened(runtime, text, column) for text in _texts_of(scope, name))
    return next((value for value in opened if value is not None), None)


def sealed(runtime: Runtime, column: Column, value: Any) -> str:
    """Return the text of a cookie with this value. Raises SecretsUnreadable."""
    stored = runtime.vault.seal(column, _NAME, value)
    return f"{stored['key']}.{stored['sealed']}".replace("=", "-").replace("/", "_").replace("+", "~")


def header(
    name: str, text: str, lasts_s: int, *, is_secure: bool, same_site: Literal["Strict", "Lax"] = "Strict"
) -> str:
    """Return a `Set-Cookie` header; with `lasts_s` 0 it removes the cookie."""
    secure = "; Secure" if is_secure else ""
    return f"{name}={text}; Path=/console; Max-Age={lasts_s}; HttpOnly; SameSite={same_site}{secure}"


def _texts_of(scope: Scope, name: str) -> Iterator[str]:
    """Yield the texts of the cookies with a name.

    Other programs of this host may set cookies that RFC 6265 does not allow, such as with spaces. Browsers send them.
    `http.cookies` reads nothing of a line that has one.
    """
    for header, value in scope["headers"]:
        if header == b"cookie":
            for one in value.decode("latin-1").split(";"):
                found, _, text = one.partition("=")
                if found.strip() == name:
                    yield text.strip()


def _opened(runtime: Runtime, text: str, column: Column) -> Any:
    key, _, ciphertext = text.replace("-", "=").replace("_", "/").replace("~", "+").partition(".")
    try:
        return runtime.vault.open_sent(column, _NAME, {"key": key, "sealed": ciphertext})
    except SecretsUnreadable:
        return None
