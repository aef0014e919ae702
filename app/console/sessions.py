"""Sessions of the console: a cookie that the secrets' key file seals, so that every process can open it.

A session names a key by its digest. It ends after 12 hours, and as soon as the key is revoked or expires. With auth off
it holds only the token that every form must repeat.
"""

import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from secrets import token_urlsafe

from starlette.types import Scope

from app.admission.route_roles import OPEN
from app.errors import Forbidden, SecretsUnreadable
from app.permissions import ANONYMOUS, Caller
from app.runtime.state import Runtime
from app.secrets.vault import SESSION

LASTS_S = 12 * 3600
# The row that the ciphertext is bound to.
_NAME = "cookie"


@dataclass(frozen=True, slots=True)
class Session:
    """A browser's session. `digest` is that of the key, empty before sign-in and with auth off."""

    digest: bytes
    token: str
    began_at: float

    def must_match(self, token: str) -> None:
        """Raise Forbidden unless a form repeats the session's token."""
        if not hmac.compare_digest(self.token.encode(), token.encode()):
            raise Forbidden("This form belongs to another session. Load the page again and repeat the act.")


def begin(runtime: Runtime, digest: bytes = b"") -> Session:
    """Return a new session."""
    return Session(digest, token_urlsafe(24), runtime.clock.time())


def session_of(runtime: Runtime, scope: Scope) -> Session | None:
    """Return the session that a request's cookie holds; None if there is none, or if it is over."""
    name = _cookie_name(runtime)
    for header, value in scope["headers"]:
        if header == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(name)
            except CookieError:
                continue
            if found is not None:
                return _opened(runtime, found.value)
    return None


def caller_of(runtime: Runtime, scope: Scope) -> Caller:
    """Return the caller of a request to the console. ANONYMOUS: no one has signed in. Raises NotThisMachine."""
    if runtime.authenticator.off:
        return runtime.authenticator.admit(scope, None, OPEN)
    session = session_of(runtime, scope)
    holder = runtime.authenticator.holder(session.digest) if session is not None and session.digest else None
    return holder or ANONYMOUS


def cookie_of(runtime: Runtime, session: Session, *, is_secure: bool) -> str:
    """Return the `Set-Cookie` header of a session. Raises SecretsUnreadable."""
    value = {"digest": session.digest.hex(), "token": session.token, "began_at": session.began_at}
    sealed = runtime.vault.seal(SESSION, _NAME, value)
    text = f"{sealed['key']}.{sealed['sealed']}".replace("=", "-").replace("/", "_").replace("+", "~")
    return _cookie(runtime, text, LASTS_S, is_secure=is_secure)


def ended_cookie(runtime: Runtime, *, is_secure: bool) -> str:
    """Return the `Set-Cookie` header that removes a session."""
    return _cookie(runtime, "", 0, is_secure=is_secure)


def _opened(runtime: Runtime, text: str) -> Session | None:
    key, _, sealed = text.replace("-", "=").replace("_", "/").replace("~", "+").partition(".")
    try:
        value = runtime.vault.open(SESSION, _NAME, {"key": key, "sealed": sealed})
    except SecretsUnreadable:
        return None
    session = Session(bytes.fromhex(value["digest"]), value["token"], value["began_at"])
    return session if runtime.clock.time() < session.began_at + LASTS_S else None


def _cookie(runtime: Runtime, text: str, lasts_s: int, *, is_secure: bool) -> str:
    secure = "; Secure" if is_secure else ""
    name = _cookie_name(runtime)
    return f"{name}={text}; Path=/console; Max-Age={lasts_s}; HttpOnly; SameSite=Strict{secure}"


def _cookie_name(runtime: Runtime) -> str:
    # Browsers do not tell cookies of different ports of one host apart.
    return f"halfnote_{runtime.settings.port}"
