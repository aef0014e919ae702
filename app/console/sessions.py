"""Sessions of the console: a cookie that the secrets' key file seals, so that every process can open it.

A session names a key by its digest, or holds a person of the issuer of OpenID Connect. It ends after 12 hours, and as
soon as the key is revoked or expires. With auth off it holds only the token that every form must repeat.
"""

import hmac
from dataclasses import asdict, dataclass
from secrets import token_urlsafe

from starlette.types import Scope

from app.admission.route_roles import OPEN
from app.console import cookies
from app.console.openid import people
from app.console.openid.people import Person
from app.errors import Forbidden
from app.permissions import ANONYMOUS, Caller
from app.runtime.state import Runtime
from app.secrets.vault import SESSION

LASTS_S = 12 * 3600


@dataclass(frozen=True, slots=True)
class Session:
    """A browser's session. `digest` is that of the key, empty before sign-in, for a `person`, and with auth off."""

    digest: bytes
    token: str
    began_at: float
    person: Person | None = None

    def must_match(self, token: str) -> None:
        """Raise Forbidden unless a form repeats the session's token."""
        if not hmac.compare_digest(self.token.encode(), token.encode()):
            raise Forbidden("This form belongs to another session. Load the page again and repeat the act.")


def begin(runtime: Runtime, digest: bytes = b"", person: Person | None = None) -> Session:
    """Return a new session."""
    return Session(digest, token_urlsafe(24), runtime.clock.time(), person)


def session_of(runtime: Runtime, scope: Scope) -> Session | None:
    """Return the session that a request's cookie holds; None if there is none, or if it is over."""
    value = cookies.value_of(runtime, scope, _cookie_name(runtime), SESSION)
    if value is None:
        return None
    person = value.get("person")
    if person is not None:
        person = Person(**{**person, "values": tuple(person["values"])})
    session = Session(bytes.fromhex(value["digest"]), value["token"], value["began_at"], person)
    return session if runtime.clock.time() < session.began_at + LASTS_S else None


def caller_of(runtime: Runtime, scope: Scope) -> Caller:
    """Return the caller of a request to the console. ANONYMOUS: no one has signed in. Raises NotThisMachine."""
    if runtime.authenticator.off:
        return runtime.authenticator.admit(scope, None, OPEN)
    session = session_of(runtime, scope)
    return ANONYMOUS if session is None else holder_of(runtime, session) or ANONYMOUS


def holder_of(runtime: Runtime, session: Session) -> Caller | None:
    """Return the caller of a session as of now: the holder of its key, or its person; None if neither may enter."""
    if session.person is not None:
        return people.caller_of(runtime.settings, session.person)
    return runtime.authenticator.holder(session.digest) if session.digest else None


def cookie_of(runtime: Runtime, session: Session, *, is_secure: bool) -> str:
    """Return the `Set-Cookie` header of a session. Raises SecretsUnreadable."""
    value = {"digest": session.digest.hex(), "token": session.token, "began_at": session.began_at}
    if session.person is not None:
        value["person"] = asdict(session.person)
    text = cookies.sealed(runtime, SESSION, value)
    return cookies.header(_cookie_name(runtime), text, LASTS_S, is_secure=is_secure)


def ended_cookie(runtime: Runtime, *, is_secure: bool) -> str:
    """Return the `Set-Cookie` header that removes a session."""
    return cookies.header(_cookie_name(runtime), "", 0, is_secure=is_secure)


def _cookie_name(runtime: Runtime) -> str:
    # Browsers do not tell cookies of different ports of one host apart.
    return f"halfnote_{runtime.settings.port}"
