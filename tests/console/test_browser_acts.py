"""Each act of the console in Debian's Chromium, to its effect: what the API answers afterwards, and the audit.

test_screens.py has one act of each kind.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from app.console.site import ACTS
from tests.support.browser import Watched
from tests.support.console_acts import EFFECTS, Person, new_subscription
from tests.support.console_world import World


@pytest.fixture
def person(world: tuple[str, World], browser: Browser) -> Iterator[Person]:
    """A person at the console, for whom no page may have a fault."""
    url, made = world
    watched = Watched(browser)
    yield Person(url, made, watched)
    watched.close()
    assert watched.faults == []


@pytest.mark.parametrize("act", [act.path for act in ACTS])
def test_an_act_has_its_effect(person: Person, act: str) -> None:
    EFFECTS[act](person)


def test_a_dialog_that_is_closed_does_nothing(person: Person) -> None:
    name = new_subscription(person.world)
    person.at(f"/subscriptions/{name}")
    dialog = person.open("Pause")
    person.page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    assert person.world.get(f"/subscriptions/{name}")["state"] == "active"
