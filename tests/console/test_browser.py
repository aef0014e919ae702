"""The console in Debian's Chromium: a real service with orders in every state, each size, light and dark, and live.

test_screens.py has each screen once, and each act.
"""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Watched, paths_of
from tests.support.console_pictures import PAGES, SCHEMES, opened, place_of, take
from tests.support.console_world import World


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
        expect(page.locator("#live")).to_have_text("Not live while you use this page", timeout=30_000)
        expect(reason).to_have_value("half a reason")
        expect(page.locator("main")).to_contain_text("paused")
        page.keyboard.press("Escape")
        expect(page.get_by_role("link", name="Pause")).to_be_visible(timeout=30_000)
        assert page.evaluate("window.wasLoadedOnce")
        assert watched.faults == []
    finally:
        watched.close()


def test_the_pictures_of_the_docs(world: tuple[str, World], browser: Browser, tmp_path: Path) -> None:
    """`make screenshots` has them written into the docs."""
    url, made = world
    place = place_of(tmp_path)
    # A process adds what it did every ten seconds.
    made.until("figures", lambda: made.get("/stats")["activity"][0]["deliveries"]["count"] > 0)
    for scheme in SCHEMES:
        watched = opened(browser, scheme)
        try:
            for name, path in PAGES.items():
                for key in ("order-1030", "order-1033"):
                    path = path.replace(f"{{{key}}}", made.ids[key])
                watched.page.goto(f"{url}/console{path}")
                take(watched, name, scheme, place)
        finally:
            watched.close()
    assert {path.stem for path in place.glob("*.png")} >= {f"{name}-{scheme}" for name in PAGES for scheme in SCHEMES}
