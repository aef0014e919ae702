"""The console in Debian's Chromium: a real service with orders in every state, each page light and dark, and acts."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from app.console.site import PAGES
from tests.conftest import migrated_template
from tests.support import postgres
from tests.support.console_world import World, answering
from tests.support.processes import ROOT, serving
from tests.support.requirements import absent

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parent / "axe" / "axe.min.js"
# A desktop at 200 % zoom, and a phone.
SIZES = {"desktop": (1280, 800), "zoomed": (640, 400), "phone": (390, 844)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, World]]:
    """The URL of a service, and what it shows."""
    dsn = postgres.create_database(migrated_template())
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, dsn)
        url = stack.enter_context(serving(tmp_path_factory.mktemp("console"), dsn))
        other = stack.enter_context(answering())
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False))
        made = World(client, other)
        made.build()
        made.settle()
        yield url, made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium."""
    if CHROMIUM is None:
        absent("Debian's chromium is not installed", "DEPS")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


class Watched:
    """A page of a new context, and what its console and its requests say went wrong."""

    def __init__(self, browser: Browser, size: str, scheme: Any) -> None:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("requestfailed", self._failed)

    def _failed(self, request: Request) -> None:
        # A page that is left ends its stream.
        if not (request.url.endswith("/console/events") and request.failure == "net::ERR_ABORTED"):
            self.faults.append(f"{request.url}: {request.failure}")

    def close(self) -> None:
        self.page.context.close()


def paths_of(world: World) -> list[str]:
    """Return the path of each page that shows something, without the pages of acts."""
    names = {
        "/console/subscriptions/{name}": ["warehouse", "crm", "accounting"],
        "/console/producer-groups/{name}": ["shop", "gone-shop"],
    }
    found = [f"/console/transactions/{world.ids[key]}" for key in ("order-1030", "order-1031", "order-1033", "photo-1")]
    for page in PAGES:
        if (
            page.method != "GET"
            or "/do/" in page.path
            or page.path.startswith("/console/sign-in")
            or page.path in ("/console/find", "/console/events")
        ):
            continue
        filled = [page.path.replace("{name}", name) for name in names.get(page.path, [])]
        found += filled or ([] if "{" in page.path else [page.path])
    return found


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("zoomed", "dark"), ("phone", "light")])
def test_each_page_has_no_fault_and_no_violation(
    world: tuple[str, World], browser: Browser, size: str, scheme: str
) -> None:
    url, made = world
    watched, found = Watched(browser, size, scheme), []
    try:
        for path in paths_of(made):
            answer = watched.page.goto(url + path)
            assert answer is not None
            assert answer.status == 200, path
            # Through the debugging protocol, which the policy of the page does not concern.
            watched.page.evaluate(AXE.read_text())
            violations = watched.page.evaluate("async () => (await axe.run()).violations")
            found += [(path, one["id"], one["nodes"][0]["html"]) for one in violations]
            wider = watched.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            found += [(path, "wider than the window", wider)] * (wider > 0)
        assert not found, "\n".join(map(str, found))
        assert watched.faults == []
    finally:
        watched.close()


def test_a_person_finds_and_acts_by_keyboard_alone(world: tuple[str, World], browser: Browser) -> None:
    url, made = world
    watched = Watched(browser, "desktop", "light")
    page = watched.page
    try:
        page.goto(f"{url}/console")
        page.keyboard.press("/")
        page.keyboard.type("order-1033")
        page.keyboard.press("Enter")
        page.wait_for_url("**/console/transactions?key=order-1033")
        page.locator(f'a[href$="{made.ids["order-1033"]}"]').focus()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_contain_text("the transaction is parked")
        page.get_by_role("link", name="Roll back").focus()
        page.keyboard.press("Enter")
        dialog = page.locator("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.type("the order was cancelled")
        page.keyboard.press("Enter")
        expect(page.locator("p.done")).to_be_visible()
        expect(page.locator("main")).to_contain_text("the order was cancelled")
        # Back and forward keep the filters.
        page.goto(f"{url}/console/transactions?state=rolled_back")
        page.locator("td a.id").first.click()
        page.go_back()
        expect(page.locator('nav.tabs a[aria-current="true"]')).to_have_text("Rolled back")
        page.go_forward()
        assert "/console/transactions/" in page.url
        assert watched.faults == []
    finally:
        watched.close()
    assert made.state("order-1033") == "rolled_back"
    audited = made.get("/audit", what="transaction.verdict")["items"]
    assert json.dumps(audited).count("the order was cancelled") == 1


def test_a_page_is_live_while_no_one_types(world: tuple[str, World], browser: Browser) -> None:
    url, made = world
    watched = Watched(browser, "desktop", "light")
    page = watched.page
    try:
        page.goto(f"{url}/console/subscriptions")
        expect(page.locator("#live")).to_have_text("Live", timeout=30_000)
        page.evaluate("window.wasLoadedOnce = true")
        row = page.locator("tr", has_text="photos").first
        expect(row).to_contain_text("active")
        made.call("POST", "/subscriptions/photos/pause")
        expect(row).to_contain_text("paused", timeout=30_000)
        assert page.evaluate("window.wasLoadedOnce")
        # An open act is left alone until it is closed.
        page.goto(f"{url}/console/subscriptions/photos")
        expect(page.locator("#live")).to_have_text("Live", timeout=30_000)
        page.evaluate("window.wasLoadedOnce = true")
        page.get_by_role("link", name="Resume").click()
        reason = page.locator("dialog input[name=reason]")
        expect(reason).to_be_focused()
        page.keyboard.type("half a reason")
        made.call("POST", "/subscriptions/photos/resume")
        page.wait_for_timeout(8000)
        expect(reason).to_have_value("half a reason")
        expect(page.locator("main")).to_contain_text("paused")
        page.keyboard.press("Escape")
        expect(page.get_by_role("link", name="Pause")).to_be_visible(timeout=30_000)
        assert page.evaluate("window.wasLoadedOnce")
        assert watched.faults == []
    finally:
        watched.close()


# The pages of docs/console.md, by the names of their pictures.
SHOWN = {
    "overview": "",
    "transactions": "/transactions",
    "transaction": "/transactions/{order-1030}",
    "subscriptions": "/subscriptions",
    "subscription": "/subscriptions/warehouse",
    "dead-letters": "/dead-letters",
    "dead-letter-groups": "/dead-letters/groups",
    "producer-groups": "/producer-groups",
    "topics": "/topics",
    "workers": "/workers",
    "proof": "/proof",
    "keys": "/keys",
    "audit": "/audit",
}


def test_the_pictures_of_the_docs(world: tuple[str, World], browser: Browser, tmp_path: Path) -> None:
    """`make screenshots` has them written into the docs."""
    url, made = world
    place = Path(os.environ.get("HALFNOTE_SCREENSHOTS") or tmp_path)
    place.mkdir(exist_ok=True)
    # A process adds what it did every ten seconds.
    made.until("figures", lambda: made.get("/stats")["activity"][0]["deliveries"]["count"] > 0)
    for scheme in ("light", "dark"):
        watched = Watched(browser, "desktop", scheme)
        try:
            watched.page.set_viewport_size({"width": 1280, "height": 720})
            for name, path in SHOWN.items():
                watched.page.goto(f"{url}/console{path.replace('{order-1030}', made.ids['order-1030'])}")
                watched.page.screenshot(path=place / f"{name}-{scheme}.png")
        finally:
            watched.close()
    pictures = {path.stem: path.stat().st_size for path in place.glob("*.png")}
    assert pictures.keys() == {f"{name}-{scheme}" for name in SHOWN for scheme in ("light", "dark")}
    page = (ROOT / "docs" / "console.md").read_text()
    assert [name for name in pictures if f"console/{name}.png" not in page] == []
    assert {path.stem for path in (ROOT / "docs" / "console").glob("*.png")} == pictures.keys()
