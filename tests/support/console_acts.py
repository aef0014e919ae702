"""Acts of a person at the console in a browser, each to its effect: what the API answers afterwards, and the audit."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import httpx
from playwright.sync_api import Locator, expect

from tests.support.browser import Watched
from tests.support.console_world import World


class Person:
    """Opens pages and acts on them, with a new reason for each act."""

    def __init__(self, url: str, world: World, watched: Watched) -> None:
        self._url, self.world, self.watched, self.page = url, world, watched, watched.page
        self.reason = f"because of {uuid4()}"

    def at(self, path: str) -> None:
        """Open a page."""
        assert self.watched.open(f"{self._url}/console{path}").status == 200

    def open(self, label: str) -> Locator:
        """Open the dialog of an act by its link, and return it."""
        self.page.locator("main [data-act]", has_text=re.compile(f"^{label}$")).first.click()
        dialog = self.page.locator("dialog")
        expect(dialog).to_be_visible()
        return dialog

    def act(self, label: str, **fields: str) -> str:
        """Carry out an act, with a reason and other fields; return what its dialog said of it."""
        dialog = self.open(label)
        preview = dialog.inner_text()
        for name, value in {**fields, "reason": self.reason}.items():
            dialog.locator(f"[name={name}]").fill(value)
        self.page.keyboard.press("Enter")
        expect(self.page.locator("[role=status]:not(#live)").first).to_be_visible()
        return preview

    def confirm(self, label: str, told: str, **fields: str) -> None:
        """Fill in an act that shows what it does before a person confirms it; `told` is a part of that."""
        dialog = self.open(label)
        for name, value in {**fields, "reason": self.reason}.items():
            dialog.locator(f"[name={name}]").fill(value)
        self.page.keyboard.press("Enter")
        expect(self.page.locator("main")).to_contain_text(told)

    def confirmed(self) -> None:
        """Confirm it."""
        self.page.locator("form.stack button").click()
        expect(self.page.locator("p.done")).to_be_visible()

    def is_audited(self, what: str) -> bool:
        """Return whether the audit has an act of this kind with the reason."""
        return self.reason in json.dumps(self.world.get("/audit", what=what)["items"])


def _doubted(world: World, count: int = 1, group: str = "slow-shop") -> list[str]:
    """Return the keys of new transactions in doubt."""
    keys = [f"order-{uuid4().hex[:8]}" for _ in range(count)]
    for key in keys:
        world.half(key, group=group)
    for key in keys:
        world.until(f"{key} in doubt", partial(_is_in_doubt, world, key))
    return keys


def _is_in_doubt(world: World, key: str) -> bool:
    return world.state(key) == "in_doubt"


def _is_delivered(world: World, key: str, name: str) -> bool:
    return world.deliveries(key).get(name) == "delivered"


def _group(world: World) -> str:
    """Return a new group of which every transaction stays in doubt."""
    name = f"group-{uuid4().hex[:8]}"
    shape = {"immunity_s": 1, "interval_s": 600, "max_checks": 1000}
    world.call("PUT", f"/producer-groups/{name}", {"check_urls": [f"{world.other}/check"], **shape})
    return name


def new_subscription(world: World, path: str = "/ok", **fields: Any) -> str:
    """Return a new subscription of a topic of its own, which has its name."""
    name = f"subscriber-{uuid4().hex[:8]}"
    destination = {"type": "webhook", "url": f"{world.other}{path}"}
    world.call("PUT", f"/subscriptions/{name}", {"topics": [name], "destination": destination, **fields})
    return name


def _dead(world: World) -> str:
    """Return a new subscription with two dead letters, whose destination has been repaired."""
    key = uuid4().hex
    name = new_subscription(world, f"/broken/{key}", retry=[])
    for number in range(2):
        world.half(f"{name}-{number}", topic=name, verdict="commit")
    world.until("dead letters", lambda: len(_dead_letters(world, name)) == 2)
    # Another URL would be used only after the worker has read the subscription again.
    assert httpx.post(f"{world.other}/repair/{key}").is_success
    return name


def _dead_letters(world: World, name: str) -> list[Any]:
    return list(world.get("/dead-letters", subscription=name)["items"])


def check(person: Person) -> None:
    [key] = _doubted(person.world)
    person.at(f"/transactions/{person.world.ids[key]}")
    assert "slow-shop" in person.act("Check now")
    person.world.until("a check", lambda: _checks(person.world, key) > 1)
    assert person.is_audited("transaction.check")


def _checks(world: World, key: str) -> int:
    timeline = world.get(f"/transactions/{world.ids[key]}")["timeline"]
    return sum(entry["what"] == "check" for entry in timeline)


def commit(person: Person) -> None:
    [key] = _doubted(person.world)
    person.at(f"/transactions/{person.world.ids[key]}")
    person.act("Commit")
    assert person.world.state(key) == "committed"
    person.world.until("a delivery", partial(_is_delivered, person.world, key, "mailer"))
    assert person.is_audited("transaction.verdict")


def rollback(person: Person) -> None:
    [key] = _doubted(person.world)
    person.at(f"/transactions/{person.world.ids[key]}")
    person.act("Roll back")
    assert person.world.state(key) == "rolled_back"
    assert person.is_audited("transaction.verdict")


def reissue(person: Person) -> None:
    key = f"order-{uuid4().hex[:8]}"
    person.world.half(key, verdict="rollback")
    person.at(f"/transactions/{person.world.ids[key]}")
    person.act("Reissue")
    again = person.world.get(f"/transactions/{person.world.ids[key]}")["reissued_as"]
    assert f"/console/transactions/{again}" in person.page.url
    assert person.world.get(f"/transactions/{again}")["state"] == "committed"
    assert person.is_audited("transaction.reissue")


def send_again(person: Person) -> None:
    name = f"late-{uuid4().hex[:8]}"
    person.world.half(name, topic=name, verdict="commit")
    destination = {"type": "webhook", "url": f"{person.world.other}/ok"}
    person.world.call("PUT", f"/subscriptions/{name}", {"topics": [name], "destination": destination})
    person.at(f"/transactions/{person.world.ids[name]}")
    assert name in person.act("Send again")
    person.world.until("a delivery", partial(_is_delivered, person.world, name, name))
    assert person.is_audited("transaction.replay")


def _many(person: Person, label: str, state: str | None, what: str) -> None:
    group = _group(person.world)
    keys = _doubted(person.world, 3, group)
    person.at(f"/transactions?producer_group={group}&state=in_doubt")
    assert "3" in person.act(label)
    if state is None:
        person.world.until("checks", lambda: all(_checks(person.world, key) > 1 for key in keys))
    else:
        assert {person.world.state(key) for key in keys} == {state}
    assert person.is_audited(what)


def edit(person: Person) -> None:
    name = new_subscription(person.world, rate_per_s=5.0)
    person.at(f"/subscriptions/{name}")
    person.confirm("Edit", "5 → 20", rate_per_s="20")
    assert person.world.get(f"/subscriptions/{name}")["rate_per_s"] == 5.0
    person.confirmed()
    assert person.world.get(f"/subscriptions/{name}")["rate_per_s"] == 20.0
    assert person.is_audited("subscription.put")


def reset_breaker(person: Person) -> None:
    before = _opened_at(person.world)
    assert before is not None
    person.at("/subscriptions/crm")
    person.act("Reset breaker")
    # The destination still fails, so the breaker opens again.
    person.world.until("a closed breaker, or a new one", lambda: _opened_at(person.world) != before)
    assert person.is_audited("subscription.reset_breaker")


def _opened_at(world: World) -> str | None:
    found: str | None = world.get("/subscriptions/crm")["breaker"]["opened_at"]
    return found


def pause(person: Person) -> None:
    name = new_subscription(person.world)
    person.at(f"/subscriptions/{name}")
    person.act("Pause")
    assert person.world.get(f"/subscriptions/{name}")["state"] == "paused"
    assert person.is_audited("subscription.pause")


def resume(person: Person) -> None:
    name = new_subscription(person.world)
    person.world.call("POST", f"/subscriptions/{name}/pause")
    person.world.half(name, topic=name, verdict="commit")
    person.at(f"/subscriptions/{name}")
    person.act("Resume")
    person.world.until("a delivery", partial(_is_delivered, person.world, name, name))
    assert person.is_audited("subscription.resume")


def try_subscription(person: Person) -> None:
    name = new_subscription(person.world)
    person.at(f"/subscriptions/{name}")
    person.act("Test")
    expect(person.page.locator("main")).to_contain_text("The destination took the test message.")
    assert person.is_audited("subscription.test")


def replay(person: Person) -> None:
    name = new_subscription(person.world)
    person.world.half(name, topic=name, verdict="commit")
    person.world.until("a delivery", partial(_is_delivered, person.world, name, name))
    person.at(f"/subscriptions/{name}")
    person.confirm("Replay", "offsets")
    assert person.world.get(f"/subscriptions/{name}/replays")["items"] == []
    person.confirmed()
    [made] = person.world.get(f"/subscriptions/{name}/replays")["items"]
    assert made["reason"] == person.reason
    person.world.until(
        "the end", lambda: person.world.get(f"/subscriptions/{name}/replays")["items"][0]["state"] == "done"
    )
    assert person.is_audited("subscription.replay")


def rotate(person: Person) -> None:
    name = new_subscription(person.world)
    person.at(f"/subscriptions/{name}")
    person.act("Rotate secret")
    expect(person.page.locator("#secret")).to_contain_text("whsec_")
    assert "whsec_" not in person.page.url
    assert person.is_audited("subscription.rotate_secret")


def redeliver(person: Person) -> None:
    name = _dead(person.world)
    person.at(f"/dead-letters?subscription={name}")
    person.act("Redeliver")
    person.world.until("one left", lambda: len(_dead_letters(person.world, name)) == 1)
    person.at(f"/dead-letters/groups?subscription={name}")
    person.act("Redeliver")
    person.world.until("none left", lambda: not _dead_letters(person.world, name))
    for number in range(2):
        person.world.until("a delivery", partial(_is_delivered, person.world, f"{name}-{number}", name))
    assert person.is_audited("dead_letter.redeliver")


def drop(person: Person) -> None:
    name = _dead(person.world)
    person.at(f"/dead-letters/groups?subscription={name}")
    assert "2" in person.act("Drop")
    assert _dead_letters(person.world, name) == []
    assert person.world.deliveries(f"{name}-0")[name] == "dropped"
    assert person.is_audited("dead_letter.drop")


def try_group(person: Person) -> None:
    person.at("/producer-groups/shop")
    person.act("Test")
    expect(person.page.locator("main")).to_contain_text("1 of 1 check URLs answered.")
    assert person.is_audited("producer_group.test")


def rotate_of_a_group(person: Person) -> None:
    name = _group(person.world)
    person.at(f"/producer-groups/{name}")
    person.act("Rotate secret")
    expect(person.page.locator("#secret")).to_contain_text("whsec_")
    assert person.is_audited("producer_group.rotate_secret")


def reissue_all(person: Person) -> None:
    group, keys = _group(person.world), [f"order-{uuid4().hex[:8]}" for _ in range(3)]
    for key in keys:
        person.world.half(key, group=group, verdict="rollback")
    person.at(f"/transactions?producer_group={group}&state=rolled_back")
    assert "3" in person.act("Reissue all")
    for key in keys:
        again = person.world.get(f"/transactions/{person.world.ids[key]}")["reissued_as"]
        assert person.world.get(f"/transactions/{again}")["state"] == "committed"
    assert person.is_audited("transaction.reissue")


# Each act of the site, and what carries it out.
_MANY, _ONE = "/console/transactions/do", "/console/transactions/{transaction_id:uuid}/do"
_SUBSCRIPTION, _GROUP = "/console/subscriptions/{name}/do", "/console/producer-groups/{name}/do"
EFFECTS: dict[str, Callable[[Person], None]] = {
    f"{_MANY}/check": lambda person: _many(person, "Check all now", None, "transaction.check"),
    f"{_MANY}/commit": lambda person: _many(person, "Commit all", "committed", "transaction.verdict"),
    f"{_MANY}/rollback": lambda person: _many(person, "Roll back all", "rolled_back", "transaction.verdict"),
    f"{_MANY}/reissue": reissue_all,
    f"{_ONE}/check": check,
    f"{_ONE}/commit": commit,
    f"{_ONE}/rollback": rollback,
    f"{_ONE}/replay": send_again,
    f"{_ONE}/reissue": reissue,
    f"{_SUBSCRIPTION}/edit": edit,
    f"{_SUBSCRIPTION}/reset-breaker": reset_breaker,
    f"{_SUBSCRIPTION}/pause": pause,
    f"{_SUBSCRIPTION}/resume": resume,
    f"{_SUBSCRIPTION}/test": try_subscription,
    f"{_SUBSCRIPTION}/replay": replay,
    f"{_SUBSCRIPTION}/rotate-secret": rotate,
    "/console/dead-letters/do/redeliver": redeliver,
    "/console/dead-letters/do/drop": drop,
    f"{_GROUP}/test": try_group,
    f"{_GROUP}/rotate-secret": rotate_of_a_group,
}
