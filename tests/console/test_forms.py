"""Forms of the console in process: numbers with all their digits, what is refused, and the commands that pages show."""

import re
import shlex
from collections.abc import Callable
from html import unescape
from typing import Any

import httpx
import pytest

from app.console.rendering import command
from app.database.connection import Connection
from tests.support.console_forms import FORM, send, sign_in, submit
from tests.support.dead_letters import bury, committed, subscription
from tests.support.keyed_services import CONFIGURED, start

__all__ = ["start"]


async def shown(client: httpx.AsyncClient, path: str) -> str:
    answer = await client.get(path, headers=FORM)
    assert answer.status_code == 200, answer.text
    return unescape(answer.text)


@pytest.mark.parametrize("act", ["redeliver", "drop"])
async def test_an_empty_field_is_no_filter_of_an_act(
    client: httpx.AsyncClient, db: Connection, group: str, act: str
) -> None:
    await subscription(client, "mailer")
    await bury(db, await committed(client, {"topic": "order", "body": 1}), "mailer")
    path = f"/console/dead-letters/do/{act}?subscription=mailer&died_after="
    refused = await client.get(path, headers=FORM)
    assert (refused.status_code, "`died_after` is empty" in refused.text) == (422, True)
    form = await client.get(path.removesuffix("&died_after="), headers=FORM)
    assert "halfnote dead-letters" in form.text
    assert 'name="died_after"' in (page := await shown(client, "/console/subscriptions/mailer"))
    assert re.search(r'<input name="died_after" required', page)


async def test_the_form_of_a_subscription_shows_all_digits(client: httpx.AsyncClient, group: str) -> None:
    await subscription(client, "mailer", retry=[86400.25, 5.0, 0.125], rate_per_s=4321.987654)
    path = "/console/subscriptions/mailer/do/edit"
    page = await shown(client, path)
    assert 'name="retry" value="86400.25, 5, 0.125"' in page
    assert 'name="rate_per_s" value="4321.987654"' in page
    asked = unescape((await submit(client, path, rate_per_s="4321.987655", reason="a hair more")).text)
    assert "4321.987654 → 4321.987655" in asked
    assert (await client.get("/subscriptions/mailer")).json()["retry"] == [86400.25, 5.0, 0.125]


async def test_a_form_that_comes_after_the_session_leads_back_to_its_act(start: Callable[..., Any]) -> None:
    _, client = await start()
    await subscription(client, "mailer")
    await sign_in(client, CONFIGURED)
    path = "/console/subscriptions/mailer/do/pause"
    form = await client.get(path, headers=FORM)
    client.cookies.clear()
    led = await send(client, form, reason="a move")
    assert led.status_code == 303
    asked = await client.get(led.headers["location"], headers=FORM)
    assert "The session is over. Nothing was done." in asked.text
    assert f'name="next" value="{path}"' in asked.text
    # Who only reads is not told of anything that was not done.
    led = await client.get(path, headers=FORM)
    assert "Nothing was done" not in (await client.get(led.headers["location"], headers=FORM)).text


@pytest.mark.parametrize("kind", ["subscriptions", "producer-groups"])
async def test_a_rotation_that_is_sent_again_makes_no_other_secret(
    client: httpx.AsyncClient, db: Connection, kind: str
) -> None:
    await subscription(client, "mailer")
    await client.put("/producer-groups/mailer", json={"check_urls": ["http://127.0.0.1:9/check"]})
    form = await client.get(f"/console/{kind}/mailer/do/rotate-secret", headers=FORM)
    first = await send(client, form, reason="it leaked")
    assert (first.status_code, first.text.count("whsec_")) == (200, 1)
    table = kind.replace("producer-groups", "producer_group").replace("subscriptions", "subscription")
    stored = await db.fetchval(f"select secrets::text from {table} where name = 'mailer'")
    again = await send(client, form, reason="it leaked")
    assert (again.status_code, "whsec_" in again.text) == (422, False)
    assert "The secret has changed since this page was shown, so nothing was done." in again.text
    assert await db.fetchval(f"select secrets::text from {table} where name = 'mailer'") == stored
    # The refusal shows the form again, for a person who wants one more.
    wanted = await send(client, again, reason="once more")
    assert (wanted.status_code, wanted.text.count("whsec_")) == (200, 1)


async def test_a_message_without_its_body_names_the_command_that_has_it(client: httpx.AsyncClient, group: str) -> None:
    messages = [{"topic": "order", "body": {"number": number}} for number in range(7)]
    half = (await client.post("/half", json={"producer_group": "shop", "messages": messages})).json()
    page = await shown(client, f"/console/transactions/{half['transaction_id']}")
    articles = page.split("<article")[1:]
    for number, article in enumerate(articles):
        said = f"halfnote messages show {half['transaction_id']}-{number}</code> has this one."
        assert (f'{{\n  "number": {number}\n}}' in article, said in article) == (number < 5, number >= 5), article


async def test_the_command_of_a_page_does_what_the_page_does(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    message_id = await committed(client, {"topic": "order", "body": 1})
    one = f"/console/dead-letters/do/drop?subscription=mailer&message_id={message_id}"
    for path, said in (
        (f"{one}&replay=3", f"halfnote dead-letters drop {message_id} --subscription mailer --replay 3<"),
        (one, f"halfnote dead-letters drop {message_id} --subscription mailer<"),
        ("/console/search?q=-x+y", "halfnote search -- '-x y'<"),
        ("/console/audit", "halfnote audit<"),
    ):
        assert said in await shown(client, path), path
    # The command line has no filter by key.
    assert "On the command line" not in await shown(client, "/console/audit?key_id=1")
    said = command("subscriptions", "get", "--all", sort="-x")
    assert shlex.split(said) == ["halfnote", "subscriptions", "get", "--sort", "-x", "--", "--all"]
