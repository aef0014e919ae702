"""A sign-in that is under way: its state, nonce and PKCE verifier, sealed in a cookie of the browser that began it.

The session's cookie is `SameSite=Strict`, so a browser does not send it when the issuer sends a person back. This one
is `Lax`, for ten minutes, and is removed at the first answer.
"""

from dataclasses import asdict, dataclass
from secrets import token_urlsafe

from starlette.types import Scope

from app.console import cookies
from app.console.asked_page import HOME
from app.runtime.state import Runtime
from app.secrets.vault import SIGN_IN

BEGIN = "/console/sign-in/openid"
CALLBACK = "/console/sign-in/openid/callback"
LASTS_S = 600


@dataclass(frozen=True, slots=True)
class SignIn:
    """The secrets of one sign-in. `began_at` is a Unix time; `page` is the one that was asked for."""

    state: str
    nonce: str
    verifier: str
    began_at: float
    page: str = HOME


def begin(runtime: Runtime, page: str = HOME) -> SignIn:
    """Return a new sign-in. The verifier has 256 random bits in 43 characters (RFC 7636 §4.1)."""
    return SignIn(token_urlsafe(24), token_urlsafe(24), token_urlsafe(32), runtime.clock.time(), page)


def sign_in_of(runtime: Runtime, scope: Scope) -> SignIn | None:
    """Return the sign-in that a request's browser began; None if there is none, or if it is over."""
    value = cookies.value_of(runtime, scope, _cookie_name(runtime), SIGN_IN)
    if value is None:
        return None
    found = SignIn(**value)
    return found if runtime.clock.time() < found.began_at + LASTS_S else None


def cookie_of(runtime: Runtime, sign_in: SignIn | None) -> str:
    """Return the `Set-Cookie` header of a sign-in; None: the one that removes it. Raises SecretsUnreadable."""
    is_secure = str(runtime.settings.public_url).startswith("https:")
    text = "" if sign_in is None else cookies.sealed(runtime, SIGN_IN, asdict(sign_in))
    lasts_s = 0 if sign_in is None else LASTS_S
    return cookies.header(_cookie_name(runtime), text, lasts_s, is_secure=is_secure, same_site="Lax")


def _cookie_name(runtime: Runtime) -> str:
    # Browsers do not tell cookies of different ports of one host apart.
    return f"halfnote_{runtime.settings.port}_openid"
