"""Sign-in by OpenID Connect in Debian's Chromium: a real issuer on another site, and a real service."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from app.console.openid.sign_in import CALLBACK
from tests.conftest import migrated_template
from tests.support import postgres
from tests.support.keyed_services import CONFIGURED
from tests.support.openid_issuers import Provider, provider
from tests.support.ports import free_port
from tests.support.processes import Service
from tests.support.requirements import absent

CHROMIUM = shutil.which("chromium")
PEOPLE = {"dana": {"email": "dana@example.com", "groups": ["oncall"]}, "erin": {"groups": ["cooks"]}}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Provider]]:
    """The URL of a service, and the issuer of its people."""
    if CHROMIUM is None:
        absent("Debian's chromium is not installed", "DEPS")
    dsn, port = postgres.create_database(migrated_template()), free_port()
    url, place = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("openid")
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, dsn)
        real = stack.enter_context(provider(place, f"{url}{CALLBACK}", PEOPLE, conform=True))
        env = {
            "DATABASE_URL": dsn,
            "AUTH": "keys",
            "ADMIN_KEY": CONFIGURED,
            "PUBLIC_URL": url,
            "OIDC_ISSUER": real.url,
            "OIDC_CLIENT_ID": "halfnote",
            "OIDC_CLIENT_SECRET": "shared between both",
            "OIDC_SCOPES": "openid,email,groups",
            "OIDC_ROLES": "oncall=operator",
            "OIDC_LABEL": "Example",
        }
        service = Service(
            place / "data", "serve", port=port, **{f"HALFNOTE_{name}": text for name, text in env.items()}
        )
        stack.callback(service.stop)
        asyncio.run(service.start())
        yield url, real


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of a new browser, which fails at what its console says."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        made = browser.new_page()
        faults: list[str] = []
        made.on("pageerror", lambda error: faults.append(str(error)))
        made.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        yield made
        browser.close()
        assert faults == []


def enter(page: Page, url: str, name: str) -> None:
    """Sign in at the issuer, and consent."""
    page.goto(f"{url}/console/sign-in")
    page.get_by_role("link", name="Sign in with Example").click()
    page.locator("[name=login]").fill(name)
    page.locator("[name=password]").fill("any")
    page.locator("[type=submit]").click()
    page.get_by_role("button", name="Continue").click()


def test_a_person_signs_in_and_comes_by_a_link_of_another_site(console: tuple[str, Provider], page: Page) -> None:
    url, real = console
    enter(page, url, "dana")
    page.wait_for_url(f"{url}/console")
    expect(page.locator(".who")).to_contain_text("dana@example.com operator")
    cookies = {one["name"]: one for one in page.context.cookies(url + "/console")}
    [session] = [one for name, one in cookies.items() if not name.endswith("_openid")]
    assert (session["sameSite"], session["httpOnly"], len(cookies)) == ("Strict", True, 1)
    # The browser keeps the cookie back for a link of another site; the page then loads itself again.
    page.goto(f"{real.url}/.well-known/openid-configuration")
    page.evaluate("to => { location.href = to }", f"{url}/console/transactions?topic=order")
    expect(page.locator(".who")).to_contain_text("dana@example.com operator")
    assert page.url == f"{url}/console/transactions?topic=order"
    [again] = [one for one in page.context.cookies(url + "/console") if one["name"] == session["name"]]
    assert again["value"] == session["value"]
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.goto(f"{url}/console")
    assert page.url == f"{url}/console/sign-in"


def test_a_person_without_a_role_reads_why(console: tuple[str, Provider], page: Page) -> None:
    url, _ = console
    enter(page, url, "erin")
    expect(page.get_by_role("alert")).to_contain_text("erin has no role here")
    page.goto(f"{url}/console")
    assert page.url == f"{url}/console/sign-in"
