"""Live pages in Debian's Chromium: what a person did not see yet comes, and what a person has in hand stays."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.browser import Watched
from tests.support.console_acts import new_subscription
from tests.support.console_world import World

LIVE, IN_USE, UNANSWERED = "Live", "Not live while you use this page", "Not live: the service does not answer"
WITHIN_MS = 30_000
# After it a live page loads itself, whatever the state: after a minute, give or take a quarter of it.
LOADED_MS = 76_000
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """A page of a new context."""
    made = Watched(browser)
    made.page.set_default_timeout(WITHIN_MS)
    yield made
    made.close()


@pytest.fixture
def name(world: tuple[str, World]) -> str:
    """A new subscription, active."""
    return new_subscription(world[1])


def shows(page: Page, text: str) -> None:
    """Wait until the sign has a text."""
    expect(page.locator("#live")).to_have_text(text)


def marked(page: Page, selector: str = "main h1") -> None:
    """Mark an element, which the next load replaces."""
    page.locator(selector).first.evaluate("(one) => { one.dataset.mark = 'yes'; }")


def replaced(page: Page, selector: str = "main h1") -> None:
    """Wait until a load has replaced the marked element."""
    expect(page.locator(f"{selector}[data-mark]")).to_have_count(0)


def has_state(page: Page, name: str, state: str) -> None:
    """Wait until the list of subscriptions has this state."""
    expect(page.locator("tr", has_text=name).first).to_contain_text(state)


def stop(made: World, name: str) -> None:
    """Change the state of the service."""
    made.call("POST", f"/subscriptions/{name}/pause")


def begun(page: Page, routes: list[Route]) -> Route:
    """Return the first request that came, and wait for it."""
    while not routes:
        page.wait_for_timeout(20)
    return routes[0]


def tell(stream: Route, *ids: str) -> None:
    """Answer a stream with events of these states; the browser does not connect again within the test."""
    events = "".join(f"event: stats\nid: {one}\ndata: {{}}\n\n" for one in ids)
    stream.fulfill(content_type="text/event-stream", body=f"retry: 600000\n\n{events}")


def test_a_change_before_the_first_look_of_the_stream_is_shown(
    world: tuple[str, World], watched: Watched, name: str
) -> None:
    url, made = world
    page, streams = watched.page, list[Route]()
    former = page.request.get(f"{url}/console/subscriptions")
    text, headers = former.text(), former.headers
    stop(made, name)
    page.route("**/console/subscriptions", lambda route: route.fulfill(body=text, headers=headers), times=1)
    page.route("**/console/events*", lambda route: streams.append(route))
    page.goto(f"{url}/console/subscriptions")
    has_state(page, name, "active")
    tell(begun(page, streams), "present")
    has_state(page, name, "paused")
    assert watched.faults == []


def test_a_page_asks_for_the_state_that_its_stream_named(world: tuple[str, World], watched: Watched) -> None:
    """Another process may answer, whose own look at the state is older."""
    url, _ = world
    page, streams = watched.page, list[Route]()
    page.route("**/console/events*", lambda route: streams.append(route))
    page.goto(f"{url}/console")
    with page.expect_request(lambda one: one.resource_type == "fetch" and one.url == f"{url}/console") as asked:
        tell(begun(page, streams), "present")
    assert asked.value.headers["last-event-id"] == "present"
    assert watched.faults == []


def test_a_page_names_the_state_that_it_is_as_new_as(world: tuple[str, World], watched: Watched) -> None:
    url, made = world
    page, other = watched.page, watched.context.new_page()
    other.goto(f"{url}/console/topics")
    shows(other, LIVE)

    def is_named() -> bool:
        with page.expect_request("**/console/events*") as asked:
            page.goto(f"{url}/console/topics")
        seen = page.locator("main").get_attribute("data-seen") or ""
        # The page asks for a newer state only.
        assert asked.value.url == f"{url}/console/events{f'?after={seen}' if seen else ''}"
        return re.fullmatch("[0-9a-f]{16}", seen) is not None

    # The other page's stream looks at the state.
    made.until("a known state", is_named)


def test_a_load_that_a_hidden_page_waited_with_comes_later(world: tuple[str, World], watched: Watched) -> None:
    url, _ = world
    page = watched.page
    page.clock.install()
    page.goto(f"{url}/console/subscriptions/warehouse")
    shows(page, LIVE)
    field = page.locator("main input[name=died_after]")
    field.focus()
    page.clock.fast_forward(LOADED_MS)
    shows(page, IN_USE)
    marked(page)
    page.evaluate(HIDE, True)
    field.blur()
    page.evaluate(HIDE, False)
    replaced(page)
    shows(page, LIVE)
    assert watched.faults == []


@pytest.mark.parametrize("fault", ["no answer", "503"])
def test_a_load_that_failed_is_repeated(world: tuple[str, World], watched: Watched, name: str, fault: str) -> None:
    url, made = world
    page, streams, failed = watched.page, list[Route](), list[Route]()

    def fail(route: Route) -> None:
        failed.append(route)
        if fault == "503":
            route.fulfill(status=503, body="<main id=main>none</main>", content_type="text/html")
        else:
            route.abort("connectionrefused")

    page.route("**/console/events*", lambda route: streams.append(route))
    page.goto(f"{url}/console/subscriptions")
    has_state(page, name, "active")
    stream = begun(page, streams)
    page.route("**/console/subscriptions", fail, times=1)
    stop(made, name)
    tell(stream, "first", "second")
    shows(page, UNANSWERED)
    has_state(page, name, "paused")
    assert len(failed) == 1


def test_typed_fields_are_kept(world: tuple[str, World], watched: Watched) -> None:
    url, _ = world
    page = watched.page
    page.clock.install()
    page.goto(f"{url}/console/dead-letters")
    shows(page, LIVE)
    field = page.locator("form.filters input[name=key]")
    field.fill("order-1030")
    field.blur()
    marked(page)
    page.clock.fast_forward(LOADED_MS)
    shows(page, IN_USE)
    expect(field).to_have_value("order-1030")
    expect(page.locator("h1[data-mark]")).to_have_count(1)
    field.fill("")
    # Beside the form nothing is typed, but the next key could be.
    page.locator("form.filters button").focus()
    expect(page.locator("h1[data-mark]")).to_have_count(1)
    page.locator("form.filters button").blur()
    replaced(page)
    shows(page, LIVE)
    assert watched.faults == []


def test_dead_letters_since_no_time_are_not_previewed(world: tuple[str, World], watched: Watched) -> None:
    url, _ = world
    page = watched.page
    page.goto(f"{url}/console/subscriptions/warehouse")
    page.get_by_role("button", name="Preview").click()
    field = page.locator("main input[name=died_after]")
    assert not field.evaluate("(one) => one.validity.valid")
    assert page.url == f"{url}/console/subscriptions/warehouse"


def test_the_focus_stays(world: tuple[str, World], watched: Watched) -> None:
    url, _ = world
    page = watched.page
    page.clock.install()
    page.goto(f"{url}/console")
    shows(page, LIVE)
    # The address of the link in a section has a time in it.
    for selector in ("summary", "section:last-of-type .scroll", "section a[href]", ".figures a[href$='parked']"):
        page.locator(f"main {selector}").first.focus()
        marked(page)
        page.clock.fast_forward(LOADED_MS)
        replaced(page)
        same = "(selector) => document.querySelector(`main ${selector}`) === document.activeElement"
        assert page.evaluate(same, selector), selector
    assert watched.faults == []


def test_the_focus_of_an_element_that_is_gone_stays_in_the_page(
    world: tuple[str, World], watched: Watched, name: str
) -> None:
    url, made = world
    page = watched.page
    page.clock.install()
    page.goto(f"{url}/console/subscriptions/{name}")
    shows(page, LIVE)
    page.get_by_role("link", name="Pause").focus()
    marked(page)
    stop(made, name)
    page.clock.fast_forward(LOADED_MS)
    replaced(page)
    expect(page.get_by_role("link", name="Pause")).to_have_count(0)
    expect(page.locator("main")).to_be_focused(timeout=WITHIN_MS)


def test_what_no_event_announces_comes_within_a_minute(world: tuple[str, World], watched: Watched, name: str) -> None:
    url, made = world
    page = watched.page
    page.clock.install()
    page.goto(f"{url}/console/subscriptions/{name}")
    shows(page, LIVE)
    made.call("PATCH", f"/subscriptions/{name}", {"rate_per_s": 77.0})
    page.clock.fast_forward(LOADED_MS)
    expect(page.locator("main")).to_contain_text("77 per second")
    # A hidden page loads when it is seen again.
    page.evaluate(HIDE, True)
    made.call("PATCH", f"/subscriptions/{name}", {"rate_per_s": 78.0})
    page.clock.fast_forward(LOADED_MS)
    page.evaluate(HIDE, False)
    expect(page.locator("main")).to_contain_text("78 per second")
    assert watched.faults == []


def test_what_was_done_is_said_once(world: tuple[str, World], watched: Watched, name: str) -> None:
    url, made = world
    page, streams = watched.page, list[Route]()
    page.clock.install()
    page.goto(f"{url}/console/subscriptions/{name}")
    page.get_by_role("link", name="Pause").click()
    page.route("**/console/events*", lambda route: streams.append(route))
    page.locator("dialog input[name=reason]").fill("a move")
    page.keyboard.press("Enter")
    said = page.locator("p.done")
    expect(said).to_have_text("The subscription is paused.")
    expect(page).to_have_url(f"{url}/console/subscriptions/{name}")
    marked(page, "p.done")
    marked(page)
    made.call("POST", f"/subscriptions/{name}/resume")
    tell(begun(page, streams), "other")
    replaced(page)
    # A new element would be read aloud again.
    expect(page.locator("p.done[data-mark]")).to_have_count(1)
    page.clock.fast_forward(LOADED_MS)
    expect(said).to_have_count(0)
    assert watched.faults == []


def test_a_subscription_that_is_deleted_is_not_shown_any_longer(
    world: tuple[str, World], watched: Watched, name: str
) -> None:
    url, made = world
    page = watched.page
    page.clock.install()
    page.goto(f"{url}/console/subscriptions/{name}")
    shows(page, LIVE)
    made.call("DELETE", f"/subscriptions/{name}")
    page.clock.fast_forward(LOADED_MS)
    expect(page.locator("main .refused")).to_contain_text(name)
    expect(page.locator("#live")).to_be_hidden()


def test_an_act_without_an_answer_leads_to_its_page(world: tuple[str, World], watched: Watched, name: str) -> None:
    url, _ = world
    page = watched.page
    held = list[Route]()
    page.route("**/do/pause", lambda route: held.append(route), times=1)
    page.goto(f"{url}/console/subscriptions/{name}")
    act = page.get_by_role("link", name="Pause")
    act.click()
    expect(act).to_have_attribute("aria-busy", "true")
    expect(act).to_have_css("cursor", "progress")
    begun(page, held).abort("connectionrefused")
    page.wait_for_url("**/do/pause")
    expect(page.locator("main h1")).to_have_text("Pause")


def test_an_act_that_is_answered_too_late_leads_to_its_page(
    world: tuple[str, World], watched: Watched, name: str
) -> None:
    url, _ = world
    page = watched.page
    held = list[Route]()
    page.route("**/do/pause", lambda route: held.append(route), times=1)
    page.goto(f"{url}/console/subscriptions/{name}")
    page.get_by_role("link", name="Pause").click()
    page.wait_for_url("**/do/pause")
    assert len(held) == 1


@pytest.mark.parametrize("clipboard", ["undefined", "{ writeText: () => Promise.reject(new Error('refused')) }"])
def test_without_a_clipboard_the_text_is_selected(world: tuple[str, World], watched: Watched, clipboard: str) -> None:
    url, _ = world
    page = watched.page
    page.add_init_script(f'Object.defineProperty(navigator, "clipboard", {{ value: {clipboard} }});')
    page.goto(f"{url}/console/subscriptions")
    button = page.locator("[data-copy]")
    button.click()
    expect(button).to_have_text("Press Ctrl+C")
    selected: Any = page.evaluate("window.getSelection().toString()")
    assert re.fullmatch("halfnote subscriptions list", selected.strip())
    assert watched.faults == []
