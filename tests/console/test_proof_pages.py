"""The pages of the proof in Debian's Chromium, with what a real run found on a service's own day."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.conftest import migrated_template
from tests.spark.days import start_proof
from tests.support import postgres
from tests.support.api_keys import bearer
from tests.support.browser import SIZES, Watched
from tests.support.console_pictures import PAGES_OF_PROOF, SCHEMES, opened, place_of, take, unlisted
from tests.support.console_world import World, answering
from tests.support.keyed_services import CONFIGURED
from tests.support.processes import serving


@dataclass(frozen=True, slots=True)
class Proved:
    """A service with keys whose day was proved, a viewer's key, and the paths of the pages by name."""

    url: str
    viewer: str
    pages: dict[str, str]


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proved]:
    """Make orders in every state, wait until they are late by an SLA of one second, and run the proof."""
    dsn, place = postgres.create_database(migrated_template()), tmp_path_factory.mktemp("proved")
    env = {
        "HALFNOTE_AUTH": "keys",
        "HALFNOTE_ADMIN_KEY": CONFIGURED,
        "HALFNOTE_REPORT_DIR": str(place / "out"),
    }
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, dsn)
        url = stack.enter_context(serving(place, dsn, **env))
        other = stack.enter_context(answering())
        client = stack.enter_context(
            httpx.Client(base_url=url, timeout=30, trust_env=False, headers=bearer(CONFIGURED))
        )
        world = World(client, other)
        world.build()
        world.settle()
        proof = start_proof(dsn, place, "--sla-s", 1, "--out", place / "out", "--master", "local[2]")
        said, errors = proof.communicate(timeout=500)
        assert proof.returncode == 3, said + errors
        # Order 1033 is parked: its producer answers `unknown`, and its policy leaves it to a person.
        [found] = world.get("/findings", state="open", kind="parked")["items"]
        assert found["transaction_id"] == world.ids["order-1033"]
        pages = {
            "proof": "/console/proof",
            "proof-day": f"/console/proof/{found['day']}",
            "findings": "/console/findings",
            "finding": f"/console/findings/{found['finding_id']}",
        }
        viewer = world.call("POST", "/api-keys", {"name": "night shift", "role": "viewer"})["key"]
        yield Proved(url, viewer, pages)


def test_each_page_of_the_proof_has_no_fault_and_no_violation(proved: Proved, browser: Browser) -> None:
    watched = Watched(browser, "desktop", "light")
    try:
        watched.sign_in(proved.url, proved.viewer)
        for name, path in proved.pages.items():
            assert watched.open(proved.url + path).status == 200, name
            assert watched.violations() == [], name
            for size in ("zoomed", "phone", "desktop"):
                width, height = SIZES[size]
                watched.page.set_viewport_size({"width": width, "height": height})
                assert watched.wider_by() <= 0, (name, size)
        assert watched.faults == []
    finally:
        watched.close()


def test_a_viewer_comes_from_the_overview_to_a_finding_and_to_the_report(proved: Proved, browser: Browser) -> None:
    watched = Watched(browser, "desktop", "light")
    page = watched.page
    try:
        watched.sign_in(proved.url, proved.viewer)
        page.locator(".figures a", has_text="Last proof").click()
        page.locator("main a", has_text="parked").click()
        page.locator("main table a[href*='/console/findings/']").first.click()
        expect(page.locator("h1")).to_contain_text("parked")
        expect(page.locator("main")).to_contain_text("shop")
        page.go_back()
        page.go_back()
        page.locator("a[href='/console/proof/report']").click()
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("body")).to_contain_text("parked")
        assert watched.faults == []
    finally:
        watched.close()


def test_the_pictures_of_the_proof(proved: Proved, browser: Browser, tmp_path: Path) -> None:
    """`make screenshots` has them written into the docs."""
    place = place_of(tmp_path)
    for scheme in SCHEMES:
        watched = opened(browser, scheme)
        try:
            watched.page.goto(f"{proved.url}/console")
            take(watched, "sign-in", scheme, place)
            watched.sign_in(proved.url, CONFIGURED)
            for name, path in {**proved.pages, "report": "/console/proof/report"}.items():
                watched.page.goto(proved.url + path)
                take(watched, name, scheme, place)
        finally:
            watched.close()
    made = {path.stem for path in place.glob("*.png")}
    assert made >= {f"{name}-{scheme}" for name in PAGES_OF_PROOF for scheme in SCHEMES}
    assert unlisted() == []
