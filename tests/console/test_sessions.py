"""Sign-in with a key: the session's cookie, its end, and refusals by role."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from app.console import sessions
from app.permissions import Role
from app.runtime.live_settings import follow
from app.secrets.key_file import new_key
from tests.conftest import client_of
from tests.support.api_keys import make
from tests.support.console_forms import FORM, sign_in, submit, token_of
from tests.support.keyed_services import CONFIGURED, start

__all__ = ["start"]


async def test_a_key_is_taken_once(start: Callable[..., Any]) -> None:
    _, client = await start()
    del client.headers["authorization"]
    for path in ("/console", "/console/transactions", "/console/subscriptions/mailer"):
        led = await client.get(path, headers=FORM)
        assert (led.status_code, led.headers["location"].partition("?")[0]) == (303, "/console/sign-in")
    wrong = await sign_in(client, "hn_" + "0" * 43)
    assert (wrong.status_code, "not known" in wrong.text) == (401, True)
    before = client.cookies.get("halfnote_8080")
    taken = await sign_in(client, CONFIGURED)
    assert (taken.status_code, taken.headers["location"]) == (303, "/console")
    cookie = taken.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=Strict", "Max-Age=43200", "Path=/console"):
        assert part in cookie
    assert "Secure" not in cookie
    assert CONFIGURED not in cookie
    assert client.cookies.get("halfnote_8080") != before
    assert (await client.get("/console", headers=FORM)).status_code == 200
    # The API takes keys only.
    assert (await client.get("/transactions")).status_code == 401
    token = token_of(await client.get("/console", headers=FORM))
    left = await client.post("/console/sign-out", data={"csrf": token})
    assert (left.status_code, "Max-Age=0" in left.headers["set-cookie"]) == (303, True)
    assert (await client.get("/console", headers=FORM)).status_code == 303


async def test_a_person_lands_on_the_page_that_was_asked_for(start: Callable[..., Any]) -> None:
    _, client = await start()
    del client.headers["authorization"]
    for asked in (
        "/console/transactions?state=parked&key=a+%26+b%3D%2F%2Fc",
        "/console/producer-groups/%22%3E%3Cb%3E",
        "/console/subscriptions/mailer/do/pause",
        "/console/find?q=order-1030",
    ):
        client.cookies.clear()
        led = await client.get(asked, headers=FORM)
        assert led.status_code == 303
        form = await client.get(led.headers["location"], headers=FORM)
        [page] = re.findall(r'name="next" value="([^"]*)"', form.text)
        # A wrong key loses nothing.
        fields = {"csrf": token_of(form), "key": "hn_" + "0" * 43, "next": unescape(page)}
        again = await client.post("/console/sign-in", data=fields)
        assert (again.status_code, f'name="next" value="{page}"' in again.text) == (401, True)
        taken = await client.post("/console/sign-in", data={**fields, "key": CONFIGURED})
        assert (taken.status_code, taken.headers["location"]) == (303, asked)
        # Who has a session is led on.
        led = await client.get(led.headers["location"], headers=FORM)
        assert (led.status_code, led.headers["location"]) == (303, asked)
    # An act is not repeated by signing in.
    client.cookies.clear()
    sent = await client.post("/console/subscriptions/mailer/do/pause", data={"reason": "x"})
    form = f"/console/sign-in?next={quote('/console/subscriptions/mailer/do/pause', safe='')}&undone=1"
    assert (sent.status_code, sent.headers["location"]) == (303, form)


HOSTILE = (
    "https://evil.example/console",
    "//evil.example/console",
    "/\\evil.example",
    "\\\\evil.example",
    "/console//evil.example",
    "/console/..//evil.example",
    "/console/%2e%2E/transactions",
    "/console/./transactions",
    "/console\\@evil.example",
    "/console@evil.example",
    "/console.evil.example/",
    "console/transactions",
    "javascript:alert(1)",
    "/transactions",
    "/docs",
    "/console/transactions\r\nset-cookie: a=b",
    "/console/transactions\n",
    "/console/transactions\x00",
    "/console/transactions?a='\"><script>",
    "/console/transactions#fragment",
    "/console/transactions\u2028",
    "/console/sign-in",
    "/console/sign-in?next=/console/sign-in",
    "/console/sign-in/openid/callback?code=x",
    "/console/sign-out",
    "/console/static/console.css",
    "/console/events",
    "/console/transactions?key=" + "k" * 1000,
    " /console/transactions",
    "",
)


async def test_a_page_of_another_place_is_not_followed(start: Callable[..., Any]) -> None:
    _, client = await start()
    del client.headers["authorization"]
    for asked in HOSTILE:
        client.cookies.clear()
        form = await client.get("/console/sign-in", params={"next": asked}, headers=FORM)
        assert 'name="next" value="/console"' in form.text, asked
        fields = {"csrf": token_of(form), "key": CONFIGURED, "next": asked}
        taken = await client.post("/console/sign-in", data=fields)
        assert (taken.status_code, taken.headers["location"]) == (303, "/console"), asked
        led = await client.get("/console/sign-in", params={"next": asked}, headers=FORM)
        assert (led.status_code, led.headers["location"]) == (303, "/console"), asked


async def test_a_cookie_is_for_tls_behind_tls(start: Callable[..., Any]) -> None:
    _, client = await start()
    client.headers["x-forwarded-proto"] = "https"
    assert "; Secure" in (await sign_in(client, CONFIGURED)).headers["set-cookie"]


async def test_a_session_ends_with_its_key_and_after_12_hours(start: Callable[..., Any]) -> None:
    runtime, client = await start()
    key = await make(runtime, Role.OPERATOR)
    async with client_of(runtime) as other:
        await sign_in(other, key)
        assert (await other.get("/console", headers=FORM)).status_code == 200
        key_id = (await client.get("/api-keys")).json()["items"][0]["key_id"]
        assert (await client.delete(f"/api-keys/{key_id}")).status_code == 204
        await follow(runtime, runtime.clock.now())
        assert (await other.get("/console", headers=FORM)).status_code == 303
    session = sessions.begin(runtime, b"digest")
    for age_s, opens in ((sessions.LASTS_S - 60, True), (sessions.LASTS_S + 1, False)):
        old = replace(session, began_at=session.began_at - age_s)
        header = sessions.cookie_of(runtime, old, is_secure=False).partition(";")[0].encode()
        found = sessions.session_of(runtime, {"type": "http", "headers": [(b"cookie", header)]})
        assert (found is not None) == opens
    for forged in (b"halfnote_8080=", b"halfnote_8080=abc.def", b"halfnote_8080=" + header[14:-4] + b"AAAA", b"\xff=;"):
        assert sessions.session_of(runtime, {"type": "http", "headers": [(b"cookie", forged)]}) is None


@pytest.mark.parametrize("foreign", ["last=Mon 1", "flag", 'consent={"a":true}', 'x="a"b', "", "halfnote_8080=abc.def"])
async def test_cookies_of_other_programs_of_the_host_do_no_harm(start: Callable[..., Any], foreign: str) -> None:
    runtime, _ = await start()
    session = sessions.begin(runtime, b"digest")
    cookie = sessions.cookie_of(runtime, session, is_secure=False).partition(";")[0]
    for line in (f"{cookie}; {foreign}", f"{foreign}; {cookie}", f"{foreign};{cookie} ; {foreign}"):
        found = sessions.session_of(runtime, {"type": "http", "headers": [(b"cookie", line.encode())]})
        assert found == session, line


async def test_a_session_ends_in_every_process_when_the_key_that_sealed_it_is_removed(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    keys, former, later = tmp_path / "secrets.keys", new_key(), new_key()
    keys.write_text(f"{former}\n")
    (_, client), (_, other) = [await start(secrets_key_file=keys) for _ in range(2)]
    del client.headers["authorization"], other.headers["authorization"]

    async def shown(at: Any) -> bool:
        other.cookies = client.cookies
        return bool((await at.get("/console", headers=FORM)).status_code == 200)

    await sign_in(client, CONFIGURED)
    # Both processes have opened the session. A key that was added ends nothing.
    keys.write_text(f"{former}\n{later}\n")
    assert (await shown(client), await shown(other)) == (True, True)
    keys.write_text(f"{later}\n")
    async with asyncio.timeout(30):
        while await shown(client) or await shown(other):
            await asyncio.sleep(0.05)
    # People sign in again without a restart, and sessions are sealed by a key that is left.
    taken = await sign_in(client, CONFIGURED)
    assert client.cookies["halfnote_8080"].startswith(later.split()[0]), taken.text
    assert (await shown(client), await shown(other)) == (True, True)


async def test_roles_are_those_of_the_api(start: Callable[..., Any]) -> None:
    runtime, admin = await start()
    url = {"type": "webhook", "url": "http://127.0.0.1:9/in"}
    assert (await admin.put("/subscriptions/mailer", json={"topics": ["order"], "destination": url})).status_code == 201
    operator = await make(runtime, Role.OPERATOR)
    for role in (Role.METRICS, Role.PRODUCER, Role.SUBSCRIBER):
        scopes = {"producer_groups": ["shop"]} if role is Role.PRODUCER else {}
        scopes |= {"topics": ["*"]} if role in (Role.PRODUCER, Role.SUBSCRIBER) else {}
        scopes |= {"subscriptions": ["*"]} if role is Role.SUBSCRIBER else {}
        async with client_of(runtime) as other:
            refused = await sign_in(other, await make(runtime, role, **scopes))
            assert (refused.status_code, "for people" in refused.text) == (403, True)
    async with client_of(runtime) as client:
        await sign_in(client, operator)
        page = await client.get("/console/subscriptions/mailer", headers=FORM)
        assert "/do/pause" in page.text
        # Only admins and subscribers rotate secrets.
        assert "/do/rotate-secret" not in page.text
        path = "/console/subscriptions/mailer/do/rotate-secret"
        assert (await client.get(path, headers=FORM)).status_code == 403
        assert (await client.post(path, data={"csrf": "x", "reason": "y"})).status_code == 403
        done = await submit(client, "/console/subscriptions/mailer/do/pause", reason="the mailer is moved")
        assert done.status_code == 303
    async with client_of(runtime) as client:
        await sign_in(client, await make(runtime, Role.VIEWER))
        for path in ("", "/subscriptions/mailer", "/dead-letters", "/keys", "/audit"):
            page = await client.get(f"/console{path}", headers=FORM)
            assert (page.status_code, "/do/" in page.text) == (200, False), path
        assert (await client.get("/console/subscriptions/mailer/do/pause", headers=FORM)).status_code == 403
    [act] = (await admin.get("/audit?what=subscription.pause")).json()["items"]
    assert (act["actor"], act["role"], act["detail"]) == ("a operator", "operator", {"reason": "the mailer is moved"})
