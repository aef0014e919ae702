"""The console in Debian's Chromium: a real service with orders in every state, each size, light and dark, and live.

test_screens.py has each screen once, and test_browser_acts.py each act.
"""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Watched, paths_of
from tests.support.console_world import World
from tests.support.processes import ROOT


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "light"), ("zoomed", "dark"), ("phone", "light")])
def test_each_page_has_no_fault_and_no_violation(
    world: tuple[str, World], browser: Browser, size: str, scheme: str
) -> None:
    url, made = world
    watched = Watched(browser, size, scheme)
    found: list[tuple[str, ...]] = []
    try:
        for path in paths_of(made):
            assert watched.open(url + path).status == 200, path
            found += [(path, *violation) for violation in watched.violations()]
            wider = watched.wider_by()
            found += [(path, "wider than the window", str(wider))] * (wider > 0)
        assert not found, "\n".join(map(str, found))
        assert watched.faults == []
    finally:
        watched.close()


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
