"""Each screen once in Debian's Chromium, with API keys: faults, accessibility, text of users, roles, and acts.

One service and one browser, so that it runs in `make test`. test_browser.py has the other sizes and colors. An act is
done to its effect: what the API answers afterwards, and the audit.
"""

import csv
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import StringIO
from urllib.parse import quote, urlencode

import httpx
import pytest
from playwright.sync_api import APIResponse, Browser, Page, StorageState, expect

from app.console.site import ACTS
from tests.conftest import migrated_template
from tests.support import postgres
from tests.support.api_keys import bearer
from tests.support.browser import SIZES, Watched, paths_of
from tests.support.console_acts import EFFECTS, Person, new_subscription
from tests.support.console_world import MARK, World, add_marked_text, answering, marked
from tests.support.keyed_services import CONFIGURED
from tests.support.processes import serving

LISTS = ("transactions", "dead-letters", "audit", "keys", "topics", "producer-groups")
# Those in `make test`, which has the forms of all acts without a browser (test_pages.py).
USUAL_ACTS = (
    "/console/dead-letters/do/redeliver",
    "/console/subscriptions/{name}/do/pause",
    "/console/transactions/{transaction_id:uuid}/do/commit",
    "/console/transactions/{transaction_id:uuid}/do/rollback",
)
# What a page has of marked text: elements and scripts that it made, and the text of the page, its fields and titles.
MADE = f"""() => ({{
  made: document.querySelectorAll("{MARK}, img, script:not([src])").length,
  ran: window.ran || null,
  text: document.documentElement.textContent + [...document.querySelectorAll("[title], [value], [href]")].flatMap(
    (one) => ["title", "value", "href"].map((name) => decodeURIComponent((one.getAttribute(name) || ""))
    )).join(" "),
}})"""


@dataclass(slots=True)
class Screen:
    """What was found on a page: violations of rules of axe, pixels that it is too wide, and marked text."""

    path: str
    status: int
    violations: list[tuple[str, str]]
    wider_by: dict[str, int]
    made: int
    ran: str | None
    text: str = field(repr=False)


@dataclass(slots=True)
class Visited:
    """What was found on the pages, the lists as CSV, and the faults that the browser told."""

    screens: list[Screen] = field(default_factory=list)
    lists: dict[str, APIResponse] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Site:
    """A service with keys, what it shows, and the names of the fields with marked text."""

    url: str
    world: World
    viewer: str
    fields: list[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service with orders in every state and marked text in every field."""
    dsn = postgres.create_database(migrated_template())
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, dsn)
        env = {"HALFNOTE_AUTH": "keys", "HALFNOTE_ADMIN_KEY": CONFIGURED}
        url = stack.enter_context(serving(tmp_path_factory.mktemp("screens"), dsn, **env))
        other = stack.enter_context(answering())
        headers = bearer(CONFIGURED)
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False, headers=headers))
        world = World(client, other)
        world.build()
        fields = add_marked_text(world, other)
        viewer = world.call("POST", "/api-keys", {"name": "night shift", "role": "viewer"})["key"]
        world.settle()
        yield Site(url, world, viewer, fields)


@pytest.fixture(scope="module")
def admin(site: Site, browser: Browser) -> StorageState:
    """What the browser keeps of an admin who signed in. A sign-in of its own would be half of each act's time."""
    watched = Watched(browser)
    try:
        watched.sign_in(site.url, CONFIGURED)
        return watched.context.storage_state()
    finally:
        watched.close()


def paths_of_marked(site: Site) -> list[str]:
    """Return the pages that have marked text and are not among the others."""
    ids, subscriptions = site.world.ids, ("marked", "picked")
    asked = urlencode({"subscription": "marked", "key": marked("key"), "error": marked("error")})
    return [
        *(f"/console/transactions/{ids[name]}" for name in ("marked", "checked", "reissued", "wrongly checked")),
        *(f"/console/producer-groups/{quote(marked(name), safe='')}" for name in ("group", "other group")),
        *(f"/console/subscriptions/{name}" for name in subscriptions),
        "/console/subscriptions/picked/do/edit",
        f"/console/transactions/{ids['wrongly checked']}/do/rollback",
        f"/console/dead-letters/do/drop?{asked}",
        f"/console/dead-letters?{asked}",
        f"/console/dead-letters/groups?{asked}",
        f"/console/search?q={MARK}",
        f"/console/transactions?{urlencode({'key': marked('key'), 'done': marked('done')})}",
    ]


@pytest.fixture(scope="module")
def visited(site: Site, browser: Browser) -> Iterator[Visited]:
    """Every page, visited once by an admin."""
    watched, found = Watched(browser), Visited()
    watched.sign_in(site.url, CONFIGURED)
    usual = paths_of(site.world, once=True)
    for path in [*usual, *paths_of_marked(site)]:
        status = watched.open(site.url + path).status
        wider = {}
        for name in ("zoomed", "desktop"):
            width, height = SIZES[name]
            watched.page.set_viewport_size({"width": width, "height": height})
            wider[name] = watched.wider_by()
        seen = watched.page.evaluate(MADE)
        # Axe takes longer than all else. Pages with marked text are of the same kinds.
        violations = watched.violations() if path in usual else []
        found.screens.append(Screen(path, status, violations, wider, **seen))
    for name in LISTS:
        found.lists[name] = watched.page.request.get(f"{site.url}/console/{name}?format=csv")
    found.faults = watched.faults
    yield found
    watched.close()


def test_each_screen_has_no_fault_and_no_violation(visited: Visited) -> None:
    found = visited.screens
    assert len(found) > 25
    assert {one.path: one.status for one in found if one.status != 200} == {}
    assert [(one.path, *violation) for one in found for violation in one.violations] == []
    assert [(one.path, one.wider_by) for one in found if any(by > 0 for by in one.wider_by.values())] == []
    # The browser tells each violation of the content security policy as an error.
    assert visited.faults == []


def test_what_users_wrote_is_text(site: Site, visited: Visited) -> None:
    found = visited.screens
    assert [(one.path, one.made, one.ran) for one in found if one.made or one.ran] == []
    text = " ".join(one.text for one in found)
    assert [name for name in site.fields if f"<{MARK}>{name}<img" not in text] == []
    for name, answer in visited.lists.items():
        assert answer.headers["content-type"] == "text/csv; charset=utf-8", name
        assert answer.headers["x-content-type-options"] == "nosniff", name
        assert answer.headers["content-disposition"].startswith("attachment"), name
        cells = [cell for row in csv.reader(StringIO(answer.text())) for cell in row]
        assert any(f"<{MARK}>" in cell for cell in cells), name


def test_a_viewer_sees_no_act_and_no_body_and_is_refused(site: Site, browser: Browser) -> None:
    watched = Watched(browser)
    page, order = watched.page, f"{site.url}/console/transactions/{site.world.ids['order-1033']}"
    try:
        watched.sign_in(site.url, site.viewer)
        for path in (order, f"{site.url}/console/subscriptions/warehouse", f"{site.url}/console/dead-letters/groups"):
            assert watched.open(path).status == 200
            assert page.locator("[data-act]").count() == 0
        watched.open(order)
        expect(page.locator("main")).to_contain_text("the transaction is parked")
        expect(page.locator("main")).not_to_contain_text("12.5")
        act = f"{order}/do/rollback"
        assert watched.open(act).status == 403
        expect(page.locator("main")).to_contain_text("viewer")
        # The form of the sign-out has the token of the session, but not of another one.
        token = page.locator("input[name=csrf]").first.get_attribute("value")
        for form in ({"csrf": token, "reason": "x"}, {"csrf": "other", "reason": "x"}, {"reason": "x"}):
            sent = page.request.post(act, form=form, headers={"origin": site.url})
            assert sent.status == 403, form
        assert [one for one in watched.faults if "403" not in one] == []
    finally:
        watched.close()
    assert site.world.state("order-1033") == "parked"


def test_an_act_needs_the_token_of_its_session(site: Site, browser: Browser) -> None:
    watched = Watched(browser)
    try:
        watched.sign_in(site.url, CONFIGURED)
        for form in ({"csrf": "other", "reason": "x"}, {"reason": "x"}):
            sent = watched.page.request.post(f"{site.url}/console/subscriptions/photos/do/pause", form=form)
            assert sent.status == 403
    finally:
        watched.close()
    assert site.world.get("/subscriptions/photos")["state"] == "active"


@pytest.mark.parametrize(
    "act", [pytest.param(act.path, marks=() if act.path in USUAL_ACTS else pytest.mark.slow) for act in ACTS]
)
def test_an_act_has_its_effect(site: Site, browser: Browser, admin: StorageState, act: str) -> None:
    watched = Watched(browser, kept=admin)
    try:
        EFFECTS[act](Person(site.url, site.world, watched))
        assert watched.faults == []
    finally:
        watched.close()


def test_a_dialog_that_is_closed_does_nothing(site: Site, browser: Browser, admin: StorageState) -> None:
    watched = Watched(browser, kept=admin)
    try:
        person, name = Person(site.url, site.world, watched), new_subscription(site.world)
        person.at(f"/subscriptions/{name}")
        dialog = person.open("Pause")
        person.page.keyboard.press("Escape")
        expect(dialog).not_to_be_visible()
        assert watched.faults == []
    finally:
        watched.close()
    assert site.world.get(f"/subscriptions/{name}")["state"] == "active"


def test_a_person_finds_and_acts_by_keyboard_alone(site: Site, browser: Browser) -> None:
    watched = Watched(browser)
    page, made = watched.page, site.world
    try:
        watched.sign_in(site.url, CONFIGURED)
        page.keyboard.press("/")
        page.keyboard.type("order-1033")
        page.keyboard.press("Enter")
        page.wait_for_url("**/console/transactions?key=order-1033")
        _tab_to(page, f'a[href$="{made.ids["order-1033"]}"]')
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_contain_text("the transaction is parked")
        _tab_to(page, "[data-act]:has-text('Roll back')")
        page.keyboard.press("Enter")
        dialog = page.locator("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.type("the order was cancelled")
        page.keyboard.press("Enter")
        expect(page.locator("p.done")).to_be_visible()
        expect(page.locator("main")).to_contain_text("the order was cancelled")
        # Back and forward keep the filters.
        shown = re.compile(r"/console/transactions/[0-9a-f-]{36}$")
        watched.open(f"{site.url}/console/transactions?state=rolled_back")
        page.locator("td a.id").first.click()
        page.wait_for_url(shown)
        expect(page.locator("main h1")).to_contain_text("Transaction")
        page.go_back()
        expect(page.locator('nav.tabs a[aria-current="true"]')).to_have_text("Rolled back")
        page.go_forward()
        page.wait_for_url(shown)
        assert watched.faults == []
    finally:
        watched.close()
    assert made.state("order-1033") == "rolled_back"
    audited = made.get("/audit", what="transaction.verdict")["items"]
    assert json.dumps(audited).count("the order was cancelled") == 1


def _tab_to(page: Page, selector: str) -> None:
    """Press the tabulator until an element has the focus."""
    for _ in range(150):
        page.keyboard.press("Tab")
        if page.locator(selector).first.evaluate("(one) => one === document.activeElement"):
            return
    raise AssertionError(f"no way by the keyboard to {selector}")
