"""An issuer of OpenID Connect: its metadata and keys, the exchange of a code for tokens, and the person.

Authlib builds the requests. They go through the same kind of client as checks and webhooks, so the egress policy holds,
and time and size are bounded. This module is imported only if an issuer is set.
"""

import hmac
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus, urlsplit

import msgspec
import structlog
from authlib.oauth2.auth import ClientAuth
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.discovery import get_well_known_url

from app.config import BadOidcSecretFile, Settings
from app.console.openid.id_token import UnknownKey, Untrusted, checked, decoded
from app.console.openid.people import Person, claim_of, person_of
from app.console.openid.sign_in import CALLBACK, SignIn
from app.errors import IssuerFailed, Overloaded, SignInRefused
from app.runtime.single_flight import SingleFlight
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

# Metadata and keys are read again after this time; keys also when none of them has signed a token.
KNOWN_FOR_S = 600.0
# Sign-ins of a process that wait for the issuer at once; each is a connection, and anyone can begin one.
AT_ONCE = 20
JSON = {"accept": "application/json"}
FORM = {**JSON, "content-type": "application/x-www-form-urlencoded"}


@dataclass(frozen=True, slots=True)
class Metadata:
    """What an issuer says about itself (OpenID Connect Discovery 1.0 §3)."""

    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None
    auth_methods: tuple[str, ...]
    names_itself: bool


class Issuer:
    """The issuer of the settings, as one process knows it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._metadata: SingleFlight[Metadata] = SingleFlight(KNOWN_FOR_S)
        self._keys: SingleFlight[list[dict[str, Any]]] = SingleFlight(KNOWN_FOR_S)
        self._under_way = 0

    @property
    def settings(self) -> Settings:
        """The settings of the process."""
        return self.runtime.settings

    async def begin(self, sign_in: SignIn) -> str:
        """Return the URL at which the issuer asks the person. Raises IssuerFailed or Overloaded."""
        async with self._turn():
            metadata = await self._metadata.get(self._discovered)
        url: str = prepare_grant_uri(
            metadata.authorization_endpoint,
            client_id=self.settings.oidc_client_id,
            response_type="code",
            redirect_uri=self._redirect_uri,
            scope=list(self.settings.oidc_scopes),
            state=sign_in.state,
            nonce=sign_in.nonce,
            code_challenge=create_s256_code_challenge(sign_in.verifier),
            code_challenge_method="S256",
        )
        return url

    async def finish(self, sign_in: SignIn, answer: Mapping[str, str]) -> Person:
        """Return the person that the issuer's answer stands for.

        `answer` is the query of the redirect. Raises SignInRefused, IssuerFailed or Overloaded.
        """
        if not hmac.compare_digest(answer.get("state", "").encode(), sign_in.state.encode()):
            raise SignInRefused("This answer belongs to another sign-in. Begin again.")
        async with self._turn():
            metadata = await self._metadata.get(self._discovered)
            self._check_issuer_of(metadata, answer)
            if "error" in answer:
                raise SignInRefused(f"The issuer refused: {_said(answer)}.")
            if not answer.get("code"):
                raise SignInRefused("The issuer's answer has no code. Begin again.")
            token = await self._exchanged(metadata, sign_in, answer["code"])
            claims = await self._verified(metadata, sign_in, token)
            if claim_of(claims, self.settings.oidc_role_claim) is None:
                claims = await self._with_user_info(metadata, claims, token)
        assert self.settings.oidc_issuer is not None
        return person_of(self.settings, self.settings.oidc_issuer, claims)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Take one of the turns of sign-ins that wait for the issuer. Raises Overloaded."""
        if self._under_way >= AT_ONCE:
            raise Overloaded(f"{AT_ONCE} sign-ins wait for the issuer; try again.", retry_after_s=1)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @property
    def _redirect_uri(self) -> str:
        return f"{self.settings.public_url}{CALLBACK}"

    def _check_issuer_of(self, metadata: Metadata, answer: Mapping[str, str]) -> None:
        """Refuse the answer of another issuer (RFC 9207). Raises SignInRefused."""
        named = answer.get("iss")
        if (named is None and metadata.names_itself) or named not in (None, self.settings.oidc_issuer):
            raise SignInRefused("The answer is not from the issuer of HALFNOTE_OIDC_ISSUER. Begin again.")

    async def _discovered(self) -> Metadata:
        issuer = str(self.settings.oidc_issuer)
        found = await self._json("GET", get_well_known_url(issuer, external=True), b"", JSON)
        if found.get("issuer") != issuer:
            raise _failed(f"its metadata names the issuer {str(found.get('issuer'))[:200]!r}")
        methods = found.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        return Metadata(
            self._endpoint(found, "authorization_endpoint"),
            self._endpoint(found, "token_endpoint"),
            self._endpoint(found, "jwks_uri"),
            self._endpoint(found, "userinfo_endpoint") if "userinfo_endpoint" in found else None,
            tuple(map(str, methods)) if isinstance(methods, list) else (),
            found.get("authorization_response_iss_parameter_supported") is True,
        )

    def _endpoint(self, found: Mapping[str, Any], name: str) -> str:
        url = found.get(name)
        if not isinstance(url, str) or not url.isascii() or not url.isprintable() or not urlsplit(url).hostname:
            raise _failed(f"its metadata has no URL as `{name}`")
        if urlsplit(url).scheme != urlsplit(str(self.settings.oidc_issuer)).scheme:
            raise _failed(f"its metadata has a URL without TLS as `{name}`")
        return url

    async def _exchanged(self, metadata: Metadata, sign_in: SignIn, code: str) -> dict[str, Any]:
        """Return the issuer's answer to a code: its tokens. Raises SignInRefused or IssuerFailed."""
        body = prepare_token_request(
            "authorization_code", redirect_uri=self._redirect_uri, code=code, code_verifier=sign_in.verifier
        )
        url, headers, body = self._client_auth(metadata).prepare("POST", metadata.token_endpoint, dict(FORM), body)
        lower = {name.lower(): value for name, value in headers.items()}
        token = await self._json("POST", url, body.encode(), lower, refusals=(400, 401, 403))
        if "error" in token:
            log.warning("openid_code_refused", error=str(token["error"])[:200], detail=_said(token))
            if token["error"] == "invalid_client":
                raise _failed("it does not accept HALFNOTE_OIDC_CLIENT_ID and the client's secret")
            raise SignInRefused(f"The issuer refused the code: {_said(token)}. Begin again.")
        if not isinstance(token.get("id_token"), str):
            raise _failed("its answer has no ID token")
        return token

    def _client_auth(self, metadata: Metadata) -> ClientAuth:
        try:
            secret = self.settings.given_oidc_secret()
        except BadOidcSecretFile as error:
            raise IssuerFailed(f"{error}.") from None
        client_id = str(self.settings.oidc_client_id)
        if secret is None:
            return ClientAuth(client_id, None, "none")
        if "client_secret_basic" in metadata.auth_methods or "client_secret_post" not in metadata.auth_methods:
            # RFC 6749 §2.3.1: both are form-encoded before they are joined.
            return ClientAuth(quote_plus(client_id), quote_plus(secret), "client_secret_basic")
        return ClientAuth(client_id, secret, "client_secret_post")

    async def _verified(self, metadata: Metadata, sign_in: SignIn, token: Mapping[str, Any]) -> dict[str, Any]:
        """Return the claims of an ID token that is right in every respect. Raises SignInRefused or IssuerFailed."""
        known = self._keys.found
        keys = await self._keys.get(lambda: self._published(metadata))
        try:
            try:
                found = decoded(token["id_token"], keys)
            except UnknownKey:
                if keys is not known:
                    # They were read for this token.
                    raise
                # The issuer may have replaced its keys since.
                self._keys = SingleFlight(KNOWN_FOR_S)
                found = decoded(token["id_token"], await self._keys.get(lambda: self._published(metadata)))
            return checked(
                found,
                issuer=str(self.settings.oidc_issuer),
                client_id=str(self.settings.oidc_client_id),
                nonce=sign_in.nonce,
                access_token=token.get("access_token"),
                now=self.runtime.clock.time(),
            )
        except Untrusted as error:
            log.warning("openid_token_refused", because=str(error))
            raise SignInRefused(f"The issuer's ID token is refused: {error}. Begin again.") from None

    async def _published(self, metadata: Metadata) -> list[dict[str, Any]]:
        found = (await self._json("GET", metadata.jwks_uri, b"", JSON)).get("keys")
        if not isinstance(found, list):
            raise _failed("its answer has no keys")
        return [key for key in found if isinstance(key, dict) and key.get("use", "sig") == "sig"]

    async def _with_user_info(
        self, metadata: Metadata, claims: dict[str, Any], token: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the claims with those of the issuer's user info. Raises SignInRefused or IssuerFailed."""
        access = token.get("access_token")
        if metadata.userinfo_endpoint is None or not isinstance(access, str) or not access.isprintable():
            return claims
        headers = {**JSON, "authorization": f"Bearer {access}"}
        found = await self._json("GET", metadata.userinfo_endpoint, b"", headers)
        if found.get("sub") != claims["sub"]:
            raise SignInRefused("The issuer's user info is about another person than its ID token.")
        claim = self.settings.oidc_role_claim
        # Of the role claim, which the ID token lacks, it may have another part of the path.
        of_roles = {name: found[name] for name in (claim, claim.partition(".")[0]) if name in found}
        return {**found, **claims, **of_roles}

    async def _json(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], refusals: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """Call the issuer; return a JSON object of a status 200, or of one of `refusals`. Raises IssuerFailed."""
        try:
            reply = await self.runtime.issuer_http.call(
                url, body, headers, timeout_s=self.settings.oidc_timeout_s, method=method
            )
        except UnicodeError:
            raise _failed("it sent a URL or a token that is not ASCII") from None
        at = urlsplit(url).hostname
        if reply.error is not None:
            raise _failed(f"{at}: {reply.error}")
        if reply.truncated:
            raise _failed(f"{at} answered with more than {len(reply.body)} bytes")
        if reply.status != 200 and reply.status not in refusals:
            raise _failed(f"{at} answered {reply.status}")
        try:
            found = msgspec.json.decode(reply.body)
        except (msgspec.DecodeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _failed(f"{at} answered {reply.status} without a JSON object")
        return found


def _failed(why: str) -> IssuerFailed:
    log.warning("openid_issuer_failed", because=why)
    return IssuerFailed(f"The issuer cannot be used: {why}. Try again, or sign in with an API key.")


def _said(answer: Mapping[str, Any]) -> str:
    return str(answer.get("error_description") or answer.get("error"))[:300].rstrip(".")
