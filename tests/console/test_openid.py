"""Sign-in by OpenID Connect: roles, refusals of what is not the issuer's answer, and a real issuer.

The hand-made issuer answers what no real one would. oidc-provider, a certified one, shows that a right one is
understood.
"""

import asyncio
import hmac
import html
import json
import re
import time
import warnings
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey
from pydantic import ValidationError

from app.console import sessions
from app.console.openid import people
from app.console.openid.people import Person
from app.console.openid.sign_in import BEGIN, CALLBACK, LASTS_S, cookie_of, sign_in_of
from app.permissions import Role
from tests.conftest import client_of
from tests.support.console_forms import FORM, submit, token_of
from tests.support.keyed_services import CONFIGURED, settings_of, start
from tests.support.openid_issuers import CLIENT_ID, HandMadeIssuer, hand_made_issuer, provider

__all__ = ["start"]

SESSION_COOKIE, SIGN_IN_COOKIE = "halfnote_8080", "halfnote_8080_openid"


@pytest.fixture
async def issuer() -> AsyncIterator[HandMadeIssuer]:
    async with hand_made_issuer() as made:
        yield made


async def led(client: httpx.AsyncClient, issuer: HandMadeIssuer) -> dict[str, str]:
    """Begin a sign-in; return what the browser brings to the issuer."""
    answer = await client.get(BEGIN, headers=FORM)
    assert answer.status_code == 303, answer.text
    asked = dict(parse_qsl(urlsplit(answer.headers["location"]).query))
    issuer.nonce = asked["nonce"]
    return asked


async def signed_in(client: httpx.AsyncClient, issuer: HandMadeIssuer, **answer: str) -> httpx.Response:
    """Sign in as the person of the issuer's claims; `answer` replaces what the browser brings back."""
    client.headers.pop("authorization", None)
    asked = await led(client, issuer)
    return await client.get(CALLBACK, params={"code": "once", "state": asked["state"], **answer}, headers=FORM)


def said(page: httpx.Response) -> str:
    found = re.search(r'role="alert">(.*?)</p>', page.text)
    assert found is not None, page.text
    return html.unescape(found[1])


async def test_a_person_signs_in_and_the_audit_names_the_person(
    start: Callable[..., Any], issuer: HandMadeIssuer
) -> None:
    issuer.claims = {"groups": ["oncall", "cooks"]}
    runtime, admin = await start(**issuer.settings(oidc_label="Example", oidc_client_secret="a b+c"))
    url = {"type": "webhook", "url": "http://127.0.0.1:9/in"}
    assert (await admin.put("/subscriptions/mailer", json={"topics": ["order"], "destination": url})).status_code == 201
    async with client_of(runtime) as client:
        page = await client.get("/console/sign-in", headers=FORM)
        assert f'href="http://localhost{BEGIN}"' in page.text
        assert "Sign in with Example" in page.text
        before = client.cookies[SESSION_COOKIE]
        asked = await led(client, issuer)
        assert (
            asked.items()
            >= {
                "response_type": "code",
                "client_id": CLIENT_ID,
                "redirect_uri": f"http://localhost{CALLBACK}",
                "scope": "openid profile email",
                "code_challenge_method": "S256",
            }.items()
        )
        answer = await client.get(CALLBACK, params={"code": "once", "state": asked["state"]}, headers=FORM)
        assert answer.status_code == 200
        assert '<meta http-equiv="refresh" content="0; url=/console">' in answer.text
        taken, removed = answer.headers.get_list("set-cookie")
        for part in (f"{SESSION_COOKIE}=", "HttpOnly", "SameSite=Strict", "Max-Age=43200", "Path=/console"):
            assert part in taken
        assert removed.startswith(f"{SIGN_IN_COOKIE}=;")
        assert "Max-Age=0" in removed
        assert client.cookies[SESSION_COOKIE] != before
        # RFC 6749 §2.3.1: the parts are form-encoded. The verifier is that of the challenge.
        [exchange] = [one for one in issuer.asked if one.path == "/token"]
        assert exchange.headers["authorization"] == "Basic " + "aGFsZm5vdGU6YSti" + "JTJCYw=="
        assert exchange.form["code"] == "once"
        assert exchange.form["redirect_uri"] == f"http://localhost{CALLBACK}"
        assert len(exchange.form["code_verifier"]) >= 43
        home = await client.get("/console", headers=FORM)
        assert "dana@example.com</span> <small>operator</small>" in home.text
        assert "SameSite" not in home.headers.get("set-cookie", "")
        done = await submit(client, "/console/subscriptions/mailer/do/pause", reason="the mailer is moved")
        assert done.status_code == 303, done.text
        refused = await client.get("/console/subscriptions/mailer/do/rotate-secret", headers=FORM)
        assert (refused.status_code, "You are an operator" in refused.text) == (403, True)
        # The session is for the console only.
        assert (await client.get("/transactions")).status_code == 401
        left = await client.post("/console/sign-out", data={"csrf": token_of(home)})
        assert (left.status_code, "Max-Age=0" in left.headers["set-cookie"]) == (303, True)
        assert (await client.get("/console", headers=FORM)).status_code == 303
    [act] = (await admin.get("/audit?what=subscription.pause")).json()["items"]
    assert (act["actor"], act["role"], act["key_id"]) == ("dana@example.com", "operator", None)
    assert act["detail"] == {"reason": "the mailer is moved", "subject": "1030"}


async def test_a_person_lands_on_the_page_that_was_asked_for(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    issuer.claims = {"groups": ["oncall"]}
    runtime, _ = await start(**issuer.settings())
    for asked, wanted in (
        ("/console/transactions?state=parked&key=a+b", "/console/transactions?state=parked&key=a+b"),
        ("//evil.example/console", "/console"),
    ):
        async with client_of(runtime) as client:
            page = await client.get("/console/sign-in", params={"next": asked}, headers=FORM)
            [button] = re.findall(rf'href="http://localhost({BEGIN}[^"]*)"', page.text)
            leading = await client.get(html.unescape(button), headers=FORM)
            query = dict(parse_qsl(urlsplit(leading.headers["location"]).query))
            issuer.nonce = query["nonce"]
            answer = await client.get(CALLBACK, params={"code": "once", "state": query["state"]}, headers=FORM)
            assert f'<meta http-equiv="refresh" content="0; url={html.escape(wanted)}">' in answer.text
            # The page is that of the request that began the sign-in.
            other = await signed_in(client, issuer, next="/console/transactions")
            assert '<meta http-equiv="refresh" content="0; url=/console">' in other.text


def by_another_key(issuer: HandMadeIssuer, claims: dict[str, Any]) -> str:
    return jwt.encode({"alg": "RS256", "kid": "one"}, claims, RSAKey.generate_key(2048))


def compact(header: dict[str, Any], claims: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """Return a token without the checks of a library."""
    parts = [urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signature = urlsafe_b64encode(sign(b".".join(parts))).rstrip(b"=")
    return b".".join([*parts, signature]).decode()


def unsigned(issuer: HandMadeIssuer, claims: dict[str, Any]) -> str:
    return compact({"alg": "none"}, claims, lambda _: b"")


def by_the_public_key(issuer: HandMadeIssuer, claims: dict[str, Any]) -> str:
    """Return a token whose signature uses the published key as a shared secret."""
    secret = issuer.key.as_pem(private=False)
    return compact({"alg": "HS256", "kid": "one"}, claims, lambda text: hmac.digest(secret, text, "sha256"))


def by_key(key: RSAKey, header: dict[str, Any], claims: dict[str, Any]) -> str:
    return compact(header, claims, lambda text: key.private_key.sign(text, PKCS1v15(), SHA256()))


def with_a_header_to_understand(issuer: HandMadeIssuer, claims: dict[str, Any]) -> str:
    return by_key(issuer.key, {"alg": "RS256", "kid": "one", "crit": ["until"], "until": 1}, claims)


def with_more_in_its_header(issuer: HandMadeIssuer, claims: dict[str, Any]) -> str:
    return by_key(issuer.key, {"alg": "RS256", "kid": "one", "until": 1}, claims)


def changed(issuer: HandMadeIssuer, claims: dict[str, Any]) -> str:
    """Return a token whose claims were replaced after it was signed."""
    header, _, signature = jwt.encode({"alg": "RS256", "kid": "one"}, claims, issuer.key).split(".")
    other = jwt.encode({"alg": "RS256"}, {**claims, "groups": ["admins"]}, RSAKey.generate_key(2048)).split(".")[1]
    return f"{header}.{other}.{signature}"


NOW = int(time.time())
TOKENS: dict[str, tuple[dict[str, Any], Callable[..., str] | None, str]] = {
    "by another key": ({}, by_another_key, "no key of the issuer has signed it"),
    "unsigned": ({}, unsigned, "signed by 'none'"),
    "by the public key as a secret": ({}, by_the_public_key, "signed by 'HS256'"),
    "changed after it was signed": ({}, changed, "no key of the issuer has signed it"),
    "with a header to understand": ({}, with_a_header_to_understand, "Unsupported"),
    "no token": ({}, lambda *_: "x", "not a signed token"),
    "not ASCII": ({}, lambda *_: "ä.ä.ä", "not a signed token"),
    "an array": ({}, lambda *_: "W10.W10.W10", "not a signed token"),
    "for another client": ({"aud": "other"}, None, "aud"),
    "for no client": ({"aud": None}, None, "aud"),
    "for another and this client": ({"aud": ["other", CLIENT_ID]}, None, "azp"),
    "used by another client": ({"azp": "other"}, None, "azp"),
    "of another issuer": ({"iss": "http://127.0.0.1:1"}, None, "iss"),
    "expired": ({"exp": NOW - 120}, None, "expired"),
    "without an end": ({"exp": None}, None, "exp"),
    "with an end that is no number": ({"exp": "later"}, None, "exp"),
    "made tomorrow": ({"iat": NOW + 86400}, None, "issued in the future"),
    "not yet valid": ({"nbf": NOW + 86400}, None, "not yet valid"),
    "of another sign-in": ({"nonce": "other"}, None, "nonce"),
    "of no sign-in": ({"nonce": None}, None, "nonce"),
    "of no one": ({"sub": None}, None, "sub"),
    "of a number": ({"sub": 7}, None, "sub"),
    "of a long subject": ({"sub": "x" * 256}, None, "sub"),
    "of another access token": ({"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"}, None, "at_hash"),
}


@pytest.mark.parametrize("name", TOKENS)
async def test_a_wrong_token_begins_no_session(start: Callable[..., Any], issuer: HandMadeIssuer, name: str) -> None:
    issuer.claims, issuer.made, reason = TOKENS[name]
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        answer = await signed_in(client, issuer)
        assert answer.status_code == 403, answer.text
        assert "The issuer's ID token is refused" in said(answer)
        assert reason in said(answer)
        [removed] = answer.headers.get_list("set-cookie")
        assert removed.startswith(f"{SIGN_IN_COOKIE}=;")
        assert (await client.get("/console", headers=FORM)).status_code == 303


async def test_weak_keys_and_keys_of_another_kind_sign_nothing(
    start: Callable[..., Any], issuer: HandMadeIssuer
) -> None:
    runtime, _ = await start(**issuer.settings())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weak = RSAKey.import_key(generate_private_key(65537, 1024))
    for_others = {**issuer.key.as_dict(private=False), "use": "enc"}
    secret = OctKey.generate_key(256).as_dict()
    for published in (weak.as_dict(private=False), for_others, secret, {"kty": "RSA"}, {"kty": "RSA", "n": 1, "e": []}):
        issuer.published = [published]
        signing = weak if published.get("n") == weak.as_dict()["n"] else issuer.key
        issuer.made = lambda _, claims, key=signing: by_key(key, {"alg": "RS256"}, claims)
        async with client_of(runtime) as client:
            assert (await signed_in(client, issuer)).status_code == 403, published


@pytest.mark.parametrize(
    "key", [ECKey.generate_key("P-256"), ECKey.generate_key("P-521"), OKPKey.generate_key("Ed25519")]
)
async def test_keys_of_every_kind_sign(start: Callable[..., Any], issuer: HandMadeIssuer, key: ECKey | OKPKey) -> None:
    algorithm = "EdDSA" if isinstance(key, OKPKey) else "ES256" if key.curve_name == "P-256" else "ES512"
    issuer.published = [key.as_dict(private=False)]

    def made(_: HandMadeIssuer, claims: dict[str, Any]) -> str:
        with warnings.catch_warnings():
            # RFC 9864 names the algorithm Ed25519; issuers of before say EdDSA.
            warnings.simplefilter("ignore")
            return jwt.encode({"alg": algorithm}, claims, key, algorithms=[algorithm])

    issuer.made = made
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        assert (await signed_in(client, issuer)).status_code == 200


@pytest.mark.parametrize(
    ("algorithm", "key", "others"),
    [
        ("ES256", ECKey.generate_key("P-256"), [ECKey.generate_key("P-384").as_dict(private=False)]),
        ("EdDSA", OKPKey.generate_key("Ed25519"), [OKPKey.generate_key("X25519").as_dict(private=False)]),
        ("ES256", ECKey.generate_key("P-256"), [{"kty": "EC", "crv": "P-256", "x": 1}, {"kty": "EC", "crv": "P-256"}]),
        (
            "ES256",
            ECKey.generate_key("P-256"),
            [{**ECKey.generate_key("P-256").as_dict(private=False), "key_ops": ["deriveKey"]}],
        ),
    ],
    ids=["another curve", "a key that signs nothing", "keys that cannot be read", "a key for another use"],
)
async def test_a_key_that_cannot_be_used_does_not_concern_the_next(
    start: Callable[..., Any], issuer: HandMadeIssuer, algorithm: str, key: ECKey | OKPKey, others: list[dict[str, Any]]
) -> None:
    runtime, _ = await start(**issuer.settings())
    issuer.published = [*others, key.as_dict(private=False)]

    def made(_: HandMadeIssuer, claims: dict[str, Any]) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return jwt.encode({"alg": algorithm}, claims, key, algorithms=[algorithm])

    issuer.made = made
    async with client_of(runtime) as client:
        entered = await signed_in(client, issuer)
        assert entered.status_code == 200, said(entered)


async def test_more_in_the_header_of_a_token_does_no_harm(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    issuer.made = with_more_in_its_header
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        assert (await signed_in(client, issuer)).status_code == 200


async def test_new_keys_are_learned_and_read_no_more_often_than_needed(
    start: Callable[..., Any], issuer: HandMadeIssuer
) -> None:
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        for _ in range(3):
            assert (await signed_in(client, issuer)).status_code == 200
        assert issuer.paths().count("/keys") == 1
        # A new key with a new id, and then one with the same id.
        for kid in ("two", "two"):
            issuer.key = RSAKey.generate_key(2048, {"kid": kid})
            assert (await signed_in(client, issuer)).status_code == 200
        assert issuer.paths().count("/keys") == 3
        issuer.made = by_another_key
        assert (await signed_in(client, issuer)).status_code == 403
        assert issuer.paths().count("/keys") == 4
        assert issuer.paths().count("/.well-known/openid-configuration") == 1


async def test_an_answer_counts_once_and_in_its_browser(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client, client_of(runtime) as other:
        asked = await led(client, issuer)
        answer = {"code": "once", "state": asked["state"]}
        # Another browser, with and without a sign-in of its own.
        assert (await other.get(CALLBACK, params=answer)).status_code == 403
        await led(other, issuer)
        issuer.nonce = asked["nonce"]
        refused = await other.get(CALLBACK, params=answer)
        assert (refused.status_code, "belongs to another sign-in" in said(refused)) == (403, True)
        assert "/token" not in issuer.paths()
        assert (await client.get(CALLBACK, params=answer)).status_code == 200
        again = await client.get(CALLBACK, params=answer)
        assert (again.status_code, "began in another browser" in said(again)) == (403, True)
        assert issuer.paths().count("/token") == 1
        # The session that began stays.
        assert (await client.get("/console", headers=FORM)).status_code == 200
        for wrong in ({}, {"state": ""}, {"code": "once"}):
            await led(client, issuer)
            assert (await client.get(CALLBACK, params=wrong)).status_code == 403
        assert issuer.paths().count("/token") == 1


async def test_a_sign_in_lasts_ten_minutes(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        await led(client, issuer)
        header = f"{SIGN_IN_COOKIE}={client.cookies[SIGN_IN_COOKIE]}".encode()
    found = sign_in_of(runtime, {"headers": [(b"cookie", header)]})
    assert found is not None
    for age_s, opens in ((LASTS_S - 60, True), (LASTS_S + 1, False)):
        old = cookie_of(runtime, replace(found, began_at=found.began_at - age_s)).partition(";")[0].encode()
        assert (sign_in_of(runtime, {"headers": [(b"cookie", old)]}) is not None) == opens
    # A session's cookie is no sign-in's: what it is for is sealed with it.
    session = sessions.cookie_of(runtime, sessions.begin(runtime), is_secure=False).partition(";")[0]
    forged = session.replace(SESSION_COOKIE, SIGN_IN_COOKIE).encode()
    assert sign_in_of(runtime, {"headers": [(b"cookie", forged)]}) is None


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_the_cookies_are_for_tls_behind_tls(
    start: Callable[..., Any], issuer: HandMadeIssuer, scheme: str
) -> None:
    runtime, _ = await start(**issuer.settings(public_url=f"{scheme}://halfnote.example.com"))
    async with client_of(runtime) as client:
        answer = await client.get(BEGIN)
        assert "redirect_uri=https%3A%2F%2Fhalfnote.example.com%2Fconsole" in answer.headers["location"]
        [cookie] = answer.headers.get_list("set-cookie")
        assert {"Secure", "HttpOnly", "SameSite=Lax", "Path=/console"} <= set(cookie.split("; "))


async def test_what_the_issuer_says_is_text(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    evil = "<script>alert(1)</script>"
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        refused = await signed_in(client, issuer, error="access_denied", error_description=evil)
        assert (refused.status_code, evil in said(refused), evil in refused.text) == (403, True, False)
        issuer.answers["/token"] = (400, {"error": "invalid_grant", "error_description": evil})
        refused = await signed_in(client, issuer)
        assert (refused.status_code, evil in said(refused), evil in refused.text) == (403, True, False)
        del issuer.answers["/token"]
        issuer.claims = {"email": f"{evil}\n\u202e"}
        assert (await signed_in(client, issuer)).status_code == 200
        home = await client.get("/console", headers=FORM)
        assert (evil in home.text, html.escape(evil) in home.text, "\u202e" in home.text) == (False, True, False)


async def test_an_answer_of_another_issuer_is_refused(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        refused = await signed_in(client, issuer, iss="https://other.example.com")
        assert (refused.status_code, "not from the issuer" in said(refused)) == (403, True)
        assert "/token" not in issuer.paths()
        assert (await signed_in(client, issuer, iss=issuer.url)).status_code == 200
    issuer.metadata = {"authorization_response_iss_parameter_supported": True}
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        assert (await signed_in(client, issuer)).status_code == 403


METADATA = "/.well-known/openid-configuration"
HUGE = b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n" + b" " * 300_000
FAULTS: dict[str, tuple[str, Any, str]] = {
    "huge metadata": (METADATA, HUGE, "more than 262144 bytes"),
    "slow metadata": (METADATA, b"HTTP/1.1 200 OK\r\n", "no whole answer within 0.5 s"),
    "metadata of another issuer": (METADATA, (200, {"issuer": "http://127.0.0.1:1"}), "names the issuer"),
    "no metadata": (METADATA, (404, {}), "answered 404"),
    "metadata that is no JSON": (METADATA, (200, b"<html>"), "without a JSON object"),
    "deep metadata": (METADATA, (200, b"[" * 100_000), "without a JSON object"),
    "huge tokens": ("/token", HUGE, "more than 262144 bytes"),
    "slow tokens": ("/token", b"HTTP/1.1 200 OK\r\n", "no whole answer within 0.5 s"),
    "tokens without an ID token": ("/token", (200, {"access_token": "opaque"}), "no ID token"),
    "an unknown client": ("/token", (401, {"error": "invalid_client"}), "HALFNOTE_OIDC_CLIENT_ID"),
    "a broken token endpoint": ("/token", (500, b"oops"), "answered 500"),
    "a redirect of the token endpoint": ("/token", (307, {}), "answered 307"),
    "huge keys": ("/keys", HUGE, "more than 262144 bytes"),
    "no keys": ("/keys", (200, {"keys": {}}), "no keys"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_failing_issuer_is_named(start: Callable[..., Any], issuer: HandMadeIssuer, name: str) -> None:
    path, answer, reason = FAULTS[name]
    issuer.answers[path] = answer
    runtime, _ = await start(**issuer.settings(oidc_timeout_s=0.5))
    async with client_of(runtime) as client:
        if path == METADATA:
            failed = await client.get(BEGIN)
        else:
            failed = await signed_in(client, issuer)
        assert (failed.status_code, reason in said(failed)) == (502, True), failed.text
        # People with keys still sign in, and the issuer is asked again next time.
        done = await submit(client, "/console/sign-in", key=CONFIGURED)
        assert (done.status_code, done.headers["location"]) == (303, "/console")
        del issuer.answers[path]
        assert (await signed_in(client, issuer)).status_code == 200


@pytest.mark.parametrize("name", ["token_endpoint", "jwks_uri", "authorization_endpoint"])
@pytest.mark.parametrize("url", [None, 7, "no address", "https://a\nb", "ftp://example.com", "http://exämple.com/x"])
async def test_metadata_without_addresses_is_refused(
    start: Callable[..., Any], issuer: HandMadeIssuer, name: str, url: Any
) -> None:
    issuer.metadata = {name: url}
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        failed = await client.get(BEGIN)
        assert (failed.status_code, f"`{name}`" in said(failed)) == (502, True)


async def test_an_issuer_at_a_denied_address_is_never_called(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    runtime, _ = await start(**issuer.settings(allow_networks=()))
    async with client_of(runtime) as client:
        failed = await client.get(BEGIN)
        assert (failed.status_code, "HALFNOTE_ALLOW_NETWORKS" in said(failed)) == (502, True)
        assert issuer.asked == []
    # Also if a good issuer names such an address.
    issuer.metadata = {"token_endpoint": "http://169.254.169.254/token"}
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        failed = await signed_in(client, issuer)
        assert (failed.status_code, "HALFNOTE_ALLOW_NETWORKS" in said(failed)) == (502, True)


async def test_few_sign_ins_wait_for_the_issuer_at_once(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    issuer.answers[METADATA] = b"HTTP/1.1 200 OK\r\n"
    runtime, _ = await start(**issuer.settings(oidc_timeout_s=3))
    async with client_of(runtime) as client:
        answers = await asyncio.gather(*(client.get(BEGIN) for _ in range(25)))
        assert sorted(one.status_code for one in answers) == [502] * 20 + [503] * 5
        # They shared one call.
        assert len(issuer.asked) == 1


async def test_roles_and_bodies_come_from_the_claim(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    runtime, _ = await start(**issuer.settings(oidc_bodies="support,admins", oidc_role_claim="realm.roles"))
    for groups, role in (
        (["staff"], "viewer"),
        (["staff", "oncall"], "operator"),
        (["oncall", "admins", "staff"], "admin"),
        ("staff", "viewer"),
    ):
        issuer.claims = {"realm": {"roles": groups}}
        async with client_of(runtime) as client:
            assert (await signed_in(client, issuer)).status_code == 200
            assert f"<small>{role}</small>" in (await client.get("/console", headers=FORM)).text
    for groups in (["cooks"], [], None, {"staff": True}, [["staff"]], ["STAFF"]):
        issuer.claims = {"realm": {"roles": groups}}
        async with client_of(runtime) as client:
            refused = await signed_in(client, issuer)
            assert (refused.status_code, "dana@example.com has no role here" in said(refused)) == (403, True)
            assert (await client.get("/console", headers=FORM)).status_code == 303


def test_a_session_follows_the_settings() -> None:
    def caller(values: tuple[str, ...], **fields: Any) -> Any:
        roles = {"staff": "viewer", "oncall": "operator", "admins": "admin"}
        known = {"oidc_issuer": "https://a.example.com", "oidc_client_id": "x", "public_url": "https://h.example.com"}
        settings = settings_of("postgresql://x@y/z", **{**known, "oidc_roles": roles, **fields})
        return people.caller_of(settings, Person("https://a.example.com", "7", "dana", values))

    assert caller(("staff",)).role is Role.VIEWER
    assert caller(("staff",), oidc_roles={"staff": "admin"}).role is Role.ADMIN
    assert caller(("staff",), oidc_roles={"others": "admin"}) is None
    assert caller(("staff",), oidc_issuer="https://b.example.com") is None
    assert caller(("staff",), oidc_issuer=None) is None
    reads = [caller(values).reads_bodies for values in (("staff",), ("oncall",), ("admins",))]
    assert reads == [False, True, True]
    some = [
        caller(values, oidc_bodies="support").reads_bodies
        for values in (("staff",), ("oncall",), ("admins",), ("staff", "support"))
    ]
    assert some == [False, False, True, True]


def test_names_that_are_not_verified_are_not_shown() -> None:
    known = {"oidc_issuer": "https://a.example.com", "oidc_client_id": "x", "public_url": "https://h.example.com"}
    settings = settings_of("postgresql://x@y/z", **known, oidc_roles="staff=viewer")
    for claims, name in (
        ({"email": "dana@example.com"}, "dana@example.com"),
        ({"email": "dana@example.com", "email_verified": True}, "dana@example.com"),
        ({"email": "dana@example.com", "email_verified": False}, "7"),
        ({"email": "dana@example.com", "email_verified": "false"}, "7"),
        ({"email": ["dana"]}, "7"),
        ({"email": " \n\u202e"}, "7"),
        ({"email": "x" * 300}, "x" * 200),
        ({}, "7"),
    ):
        assert people.person_of(settings, "https://a.example.com", {"sub": "7", **claims}).name == name


async def test_claims_may_come_from_the_user_info(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    issuer.claims, issuer.user_info = {"groups": None}, {"groups": ["oncall"], "email": "other@example.com"}
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        assert (await signed_in(client, issuer)).status_code == 200
        # What is signed counts first.
        assert "dana@example.com</span> <small>operator</small>" in (await client.get("/console", headers=FORM)).text
        assert issuer.asked[-1].headers["authorization"] == "Bearer opaque"
        issuer.user_info["sub"] = "another"
        refused = await signed_in(client, issuer)
        assert (refused.status_code, "another person" in said(refused)) == (403, True)


async def test_a_path_that_the_id_token_only_begins_is_read_from_the_user_info(
    start: Callable[..., Any], issuer: HandMadeIssuer
) -> None:
    issuer.claims = {"groups": ["none"], "access": {"account": {"roles": ["member"]}}}
    issuer.user_info = {"email": "other@example.com", "access": {"halfnote": {"roles": ["oncall"]}}}
    runtime, _ = await start(**issuer.settings(oidc_role_claim="access.halfnote.roles"))
    async with client_of(runtime) as client:
        entered = await signed_in(client, issuer)
        assert entered.status_code == 200, said(entered)
        assert "dana@example.com</span> <small>operator</small>" in (await client.get("/console", headers=FORM)).text


async def test_a_claim_may_be_named_by_a_url(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    claim = "https://example.com/roles"
    issuer.claims = {claim: ["oncall"]}
    issuer.user_info = {"sub": "another"}
    runtime, _ = await start(**issuer.settings(oidc_role_claim=claim))
    async with client_of(runtime) as client:
        # The ID token has the claim, so the user info is not asked.
        entered = await signed_in(client, issuer)
        assert entered.status_code == 200, said(entered)
        assert "<small>operator</small>" in (await client.get("/console", headers=FORM)).text


async def test_a_person_with_many_groups_signs_in(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    groups = [f"CN=group-{n},OU={'x' * 100},DC=example,DC=com" for n in range(60)]
    roles = {**dict.fromkeys(groups, "viewer"), groups[40]: "operator"}
    runtime, _ = await start(**issuer.settings(oidc_roles=json.dumps(roles), oidc_bodies=json.dumps([groups[50]])))
    issuer.claims = {"groups": groups, "email": "\U0001f600" * 300}
    async with client_of(runtime) as client:
        entered = await signed_in(client, issuer)
        assert entered.status_code == 200, said(entered)
        [cookie] = [one for one in entered.headers.get_list("set-cookie") if one.startswith(f"{SESSION_COOKIE}=")]
        # Browsers drop a larger one.
        assert len(cookie) <= 4096
        assert "<small>operator</small>" in (await client.get("/console", headers=FORM)).text
        session = sessions.session_of(runtime, {"headers": [(b"cookie", cookie.partition(";")[0].encode())]})
        assert session is not None
        caller = sessions.holder_of(runtime, session)
        assert caller is not None
        assert (caller.role, caller.reads_bodies) == (Role.OPERATOR, True)


async def test_a_client_names_itself_as_the_issuer_asks(
    start: Callable[..., Any], issuer: HandMadeIssuer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first\n")
    issuer.metadata = {"token_endpoint_auth_methods_supported": ["client_secret_post", "private_key_jwt"]}
    runtime, _ = await start(**issuer.settings(oidc_client_secret_file=secret))
    async with client_of(runtime) as client:
        for text in ("first", "second"):
            secret.write_text(f"{text}\n")
            assert (await signed_in(client, issuer)).status_code == 200
            exchange = [one for one in issuer.asked if one.path == "/token"][-1]
            assert (exchange.form["client_id"], exchange.form["client_secret"]) == (CLIENT_ID, text)
            assert "authorization" not in exchange.headers
        secret.unlink()
        failed = await signed_in(client, issuer)
        assert (failed.status_code, "HALFNOTE_OIDC_CLIENT_SECRET_FILE" in said(failed)) == (502, True)
    runtime, _ = await start(**issuer.settings())
    async with client_of(runtime) as client:
        assert (await signed_in(client, issuer)).status_code == 200
        exchange = [one for one in issuer.asked if one.path == "/token"][-1]
        assert ("client_secret" in exchange.form, "authorization" in exchange.headers) == (False, False)
        assert exchange.form["client_id"] == CLIENT_ID


async def test_without_an_issuer_there_is_no_such_page(start: Callable[..., Any]) -> None:
    runtime, _ = await start()
    async with client_of(runtime) as client:
        for path in (BEGIN, CALLBACK):
            assert (await client.get(path, headers=FORM)).status_code == 404
        assert "Sign in with" not in (await client.get("/console/sign-in", headers=FORM)).text


async def test_people_have_a_rate_each(start: Callable[..., Any], issuer: HandMadeIssuer) -> None:
    runtime, _ = await start(**issuer.settings(key_rate_per_s=1))
    async with client_of(runtime) as dana, client_of(runtime) as erin:
        assert (await signed_in(dana, issuer)).status_code == 200
        issuer.claims = {"sub": "1031", "email": "erin@example.com"}
        assert (await signed_in(erin, issuer)).status_code == 200
        answers = [(await dana.get("/console/topics", headers=FORM)).status_code for _ in range(3)]
        assert (answers[0], 429 in answers) == (200, True)
        assert (await erin.get("/console/topics", headers=FORM)).status_code == 200
    # Metrics do not name people.
    refused = {"key": "OpenID Connect", "key_id": "0", "limit": "rate"}
    assert runtime.metrics.registry.get_sample_value("halfnote_key_refusals_total", refused) == answers.count(429)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"oidc_client_id": None}, "HALFNOTE_OIDC_CLIENT_ID"),
        ({"oidc_roles": ""}, "HALFNOTE_OIDC_ROLES"),
        ({"public_url": ""}, "HALFNOTE_PUBLIC_URL"),
        ({"public_url": "https://h.example.com/halfnote"}, "no path"),
        ({"public_url": "http://h.example.com"}, "https://"),
        ({"oidc_issuer": "http://a.example.com"}, "https://"),
        ({"oidc_issuer": "https://a.example.com?x=1"}, "query"),
        ({"oidc_issuer": "a.example.com"}, "URL"),
        ({"auth": "off", "admin_key": None}, "HALFNOTE_AUTH=keys"),
        ({"oidc_scopes": "email"}, "openid"),
        ({"oidc_roles": "staff=producer"}, "viewer"),
        ({"oidc_roles": "staff"}, "value=role"),
        ({"oidc_roles": "{"}, "JSON"),
        ({"oidc_client_secret": "x", "oidc_client_secret_file": "/x"}, "not both"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(fields: dict[str, Any], fault: str) -> None:
    known = {
        "oidc_issuer": "https://a.example.com",
        "oidc_client_id": "x",
        "public_url": "https://h.example.com",
        "oidc_roles": "staff=viewer",
    }
    with pytest.raises(ValidationError, match=re.escape(fault)):
        settings_of("postgresql://x@y/z", **{**known, **fields})


def test_roles_are_written_as_pairs_or_as_json() -> None:
    known = {"oidc_issuer": "https://a.example.com/", "oidc_client_id": "x", "public_url": "https://h.example.com/"}
    pairs = settings_of("postgresql://x@y/z", **known, oidc_roles=" cn=a=operator , staff=viewer", oidc_bodies="")
    assert pairs.oidc_roles == {"cn=a": Role.OPERATOR, "staff": Role.VIEWER}
    assert (pairs.oidc_bodies, pairs.public_url) == (None, "https://h.example.com")
    named = settings_of("postgresql://x@y/z", **known, oidc_roles='{"cn=a,ou=b": "admin"}', oidc_bodies='["cn=a,ou=b"]')
    assert (named.oidc_roles, named.oidc_bodies) == ({"cn=a,ou=b": Role.ADMIN}, ("cn=a,ou=b",))


FIELD = re.compile(r'<form[^>]* action="([^"]+)"')


def answered(browser: httpx.Client, page: httpx.Response, **fields: str) -> httpx.Response:
    """Send the one form of a page of the issuer, and follow it to the service's address."""
    found = FIELD.search(page.text)
    assert found is not None, page.text
    prompt = re.search(r'name="prompt" value="([^"]+)"', page.text)
    assert prompt is not None
    url = httpx.URL(str(page.url)).join(html.unescape(found[1]))
    return browser.post(url, data={"prompt": prompt[1], **fields})


@pytest.mark.parametrize("conform", [False, True], ids=["claims in the ID token", "claims in the user info"])
@pytest.mark.parametrize("client", [{}, {"token_endpoint_auth_method": "client_secret_post"}], ids=["basic", "post"])
async def test_people_of_a_real_issuer_sign_in(
    start: Callable[..., Any], tmp_path: Path, conform: bool, client: dict[str, Any]
) -> None:
    known = {"dana": {"email": "dana@example.com", "email_verified": True, "groups": ["oncall"]}, "erin": {}}
    keys = [RSAKey.generate_key(2048, {"kid": f"key {number}"}).as_dict(private=True) for number in (1, 2)]
    given: dict[str, Any] = {"conform": conform, "client": client, "jwks": {"keys": keys[:1]}}
    with provider(tmp_path, f"http://localhost{CALLBACK}", known, **given) as real:
        runtime, _ = await start(
            oidc_issuer=real.url,
            oidc_client_id="halfnote",
            oidc_client_secret="shared between both",
            oidc_scopes="openid,email,groups",
            oidc_roles="oncall=operator",
            public_url="http://localhost",
        )
        for name, status in (("dana", 200), ("erin", 403)):
            assert await entered(runtime, name) == status
        # Its keys are replaced.
        real.stop()
        configuration = json.loads(real.configuration.read_text())
        real.configuration.write_text(json.dumps({**configuration, "jwks": {"keys": keys[1:]}}))
        real.start()
        assert await entered(runtime, "dana") == 200


async def entered(runtime: Any, name: str) -> int:
    """Sign in at the real issuer's forms; return the status of the service's answer."""
    async with client_of(runtime) as client:
        begun = await client.get(BEGIN, headers=FORM)
        assert begun.status_code == 303, begun.text

        def at_the_issuer() -> str:
            with httpx.Client(trust_env=False) as browser:
                page = browser.get(begun.headers["location"])
                while not page.headers.get("location", "").startswith("http://localhost/"):
                    if page.is_redirect:
                        page = browser.get(httpx.URL(str(page.url)).join(page.headers["location"]))
                    else:
                        assert page.status_code == 200, page.text
                        page = answered(browser, page, login=name, password="any")
                return str(page.headers["location"])

        back = await asyncio.to_thread(at_the_issuer)
        answer = await client.get(back, headers=FORM)
        # A code is for one use.
        if answer.status_code == 200:
            home = await client.get("/console", headers=FORM)
            assert "dana@example.com</span> <small>operator</small>" in home.text
        return answer.status_code
