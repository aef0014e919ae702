"""Pages and acts of the console in process, with auth off: answers, headers, escaping, and the audit of acts."""

import csv
import json
import re
from datetime import UTC, datetime, timedelta
from html import escape, unescape
from io import StringIO
from urllib.parse import parse_qs, urlencode, urlsplit
from uuid import UUID

import httpx
import pytest

from app.console.acts import dead_letters as dead_letter_acts
from app.console.rendering import exact
from app.console.site import PAGES
from app.database.connection import Connection
from app.runtime.state import Runtime
from tests.support.console_forms import FORM, send, submit, token_of
from tests.support.dead_letters import AT, bury, committed, subscription
from tests.support.proof_runs import DAY, find, reconciled

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)


# The names of files that differ from their paths.
FILES = {"dead-letters/groups": "dead-letter-groups"}


async def half(client: httpx.AsyncClient, **message: object) -> str:
    body = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}, **message}]}
    answer = await client.post("/half", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def audited(db: Connection) -> list[tuple[str, str | None]]:
    rows = await db.fetch("select what, detail ->> 'reason' as reason from audit order by audit_id")
    return [(row["what"], row["reason"]) for row in rows if row["what"] != "subscription.put"]


async def test_every_page_answers_with_the_policy(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    message_id = await committed(client, {"topic": "order", "key": "order-1030", "body": {"order": 1030}})
    await bury(db, message_id, "mailer")
    await reconciled(db, "findings", DAY)
    values = {"{name}": "mailer", "{transaction_id:uuid}": message_id[:36], "{day}": str(DAY)}
    for page in PAGES:
        path = page.path
        for name, value in values.items():
            path = path.replace(name, value)
        if "producer-groups" in path:
            path = path.replace("/mailer", "/shop")
        if page.method != "GET" or page.path.startswith("/console/sign-in") or "finding_id" in path:
            continue
        if page.path in ("/console/events", "/console/proof/report"):
            # It has no end; it is no page of the console (test_proof_report.py).
            continue
        queries = {
            "/console/dead-letters/do": f"?subscription=mailer&message_id={message_id}",
            "/console/transactions/do": "?producer_group=shop&state=in_doubt",
            "/console/transactions/do/reissue": "?producer_group=shop&state=rolled_back",
        }
        query = queries.get(path, queries.get(path.rpartition("/")[0], ""))
        answer = await client.get(path + query, headers=FORM)
        assert answer.status_code == (303 if path == "/console/find" else 200), (path, unescape(answer.text))
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["cache-control"] == "no-store"
        if path == "/console/find":
            continue
        # Neither inline scripts nor inline styles, which the policy would refuse.
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", answer.text)


async def test_three_clicks_lead_from_the_overview_to_why_an_order_has_not_arrived(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    for name, put in {
        "refunds": {"filters": {"tags": ["refunded"]}},
        "us-only": {"filters": {"headers": {"region": "us"}}},
        "photos": {"topics": ["photo"]},
        "stopped": {},
        "crm": {},
    }.items():
        await subscription(client, name, **put)
    order = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}
    message_id = await committed(client, order)
    await bury(db, message_id, "mailer")
    await client.post("/subscriptions/stopped/pause")
    await db.execute("update subscription set state = 'disabled', state_reason = 'answered 410' where name = 'crm'")
    await subscription(client, "late")
    overview = await client.get("/console", headers=FORM)
    assert 'action="/console/find"' in overview.text
    found = await client.get("/console/find", params={"q": "order-1030"}, headers=FORM, follow_redirects=True)
    assert found.url.path == "/console/transactions"
    [opened] = re.findall(r'href="(/console/transactions/[0-9a-f-]{36})"', found.text)
    page = re.sub("</?code>", "`", unescape((await client.get(opened, headers=FORM)).text))
    [message] = (await client.get(f"/transactions/{message_id[:36]}/delivery")).json()["messages"]
    reasons = {one["subscription"]: one["reason"] for one in message["subscriptions"]}
    assert reasons == {
        "mailer": "dead",
        "refunds": "filtered_by_tag",
        "us-only": "filtered_by_header",
        "photos": "no_topic_match",
        "stopped": "paused",
        "crm": "disabled",
        "late": "subscription_newer",
    }
    for one in message["subscriptions"]:
        assert one["sentence"] in page
    assert message["sentence"] in page
    # An id leads to its transaction in one step.
    for q in (message_id, message_id[:36]):
        led = await client.get("/console/find", params={"q": f" {q} "}, headers=FORM)
        assert led.headers["location"].partition("#")[0] == opened


async def test_each_figure_of_the_overview_leads_to_its_list(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    message_id = await committed(client, {"topic": "order", "key": "order-1030", "body": {"order": 1030}})
    await bury(db, message_id, "mailer")
    await subscription(client, "crm")
    await committed(client, {"topic": "order", "body": {"order": 1031}})
    doubted = await half(client, key="order-1032")
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) values ($1::uuid, 'shop', 1, now())",
        doubted,
    )
    await db.execute("update checkpoint set opened_at = now(), opened_because = 'answered 503'")
    await db.execute("update day set held = '{undelivered:mailer,parked}' where day = (select min(day) from day)")
    page = (await client.get("/console", headers=FORM)).text
    for label, value, to in (
        ("In doubt", "1", "/console/transactions?state=in_doubt"),
        ("Parked", "0", "/console/transactions?state=parked"),
        ("Dead letters", "1", "/console/dead-letters/groups"),
        ("Open breakers", "2", "/console/subscriptions?sort=state"),
        ("Not active", "0", "/console/subscriptions?sort=state"),
        ("Held days", "1", "/console/proof"),
        ("Workers", "0", "/console/workers"),
    ):
        assert re.search(rf'<a href="{re.escape(to)}"><span>{label}</span><b class="[a-z]*">{value}</b>', page), label
        assert (await client.get(to, headers=FORM)).status_code == 200
    assert re.search(r'<a href="/console/subscriptions/(crm|mailer)"><span>Oldest lag</span>', page)
    assert f"/console/transactions/{doubted}" in page
    assert "answered 503" in page
    assert 'undelivered <a href="/console/subscriptions/mailer">mailer</a>' in page
    assert "born_after=" in page


async def test_the_field_leads_to_the_only_hit_or_lists_all(client: httpx.AsyncClient, group: str) -> None:
    for name in ("us-mailer", "eu-mailer", "crm"):
        await subscription(client, name)
    await committed(client, {"topic": "crm.lead", "key": "eu-mailer", "body": 1})
    for q, to in (
        ("", "/console/transactions"),
        ("US-mail", "/console/subscriptions/us-mailer"),
        ("crm.", "/console/transactions?topic=crm.lead"),
        ("mailer", "/console/search?q=mailer"),
        # A key and a name.
        ("eu-mailer", "/console/search?q=eu-mailer"),
        ("nothing", "/console/search?q=nothing"),
    ):
        led = await client.get("/console/find", params={"q": q}, headers=FORM)
        assert (led.status_code, led.headers["location"]) == (303, to), q
    listed = (await client.get("/console/search", params={"q": "eu-mailer"}, headers=FORM)).text
    assert 'href="/console/subscriptions/eu-mailer"' in listed
    assert re.search(r'href="/console/transactions/[0-9a-f-]{36}"', listed)
    rows = (await client.get("/console/search", params={"q": "mailer", "format": "csv"}, headers=FORM)).text
    assert [row.split(",")[:3] for row in rows.splitlines()[1:]] == [
        ["subscription", "eu-mailer", "name"],
        ["subscription", "us-mailer", "name"],
    ]
    assert "No stored transaction" in (await client.get("/console/search?q=nothing", headers=FORM)).text
    refused = await client.get("/console/search", params={"q": "x" * 256}, headers=FORM)
    assert refused.status_code == 422


async def test_a_browser_is_led_to_the_console_and_others_get_json(client: httpx.AsyncClient) -> None:
    led = await client.get("/", headers=FORM)
    assert (led.status_code, led.headers["location"]) == (303, "/console")
    plain = await client.get("/")
    assert (plain.status_code, plain.json()["type"]) == (404, "/problems/not-found")


async def test_the_pages_have_only_text_of_users(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer", topics=["*"])
    message = {"topic": EVIL, "key": EVIL, "tag": EVIL, "headers": {"x-evil": EVIL}, "body": {"evil": EVIL}}
    message_id = await committed(client, message)
    await bury(db, message_id, "mailer")
    await db.execute("update dead_letter set error = $1, response = $1", EVIL)
    parked = await half(client, key=EVIL)
    await submit(client, f"/console/transactions/{parked}/do/rollback", reason=EVIL, force="on")
    await client.post("/subscriptions/mailer/pause")
    await db.execute("update subscription set state_reason = $1", EVIL)
    texts = []
    for path in (
        "/console",
        "/console/transactions",
        f"/console/transactions?key={EVIL}",
        f"/console/transactions?done={EVIL}",
        f"/console/transactions/{message_id[:36]}",
        f"/console/transactions/{parked}",
        "/console/subscriptions",
        "/console/subscriptions/mailer",
        "/console/dead-letters",
        "/console/topics",
        "/console/audit",
        f"/console/subscriptions/{EVIL.replace('/', '')}",
        f"/console/dead-letters/do/drop?subscription=mailer&message_id={message_id}",
    ):
        texts.append((await client.get(path, headers=FORM)).text)
        assert "<img src=x" not in texts[-1], path
        assert "<script>" not in texts[-1], path
    assert sum("&lt;img src=x" in text for text in texts) >= 10
    # The body and the reason are there, as text.
    assert EVIL in unescape(texts[5])
    assert "<img src=x onerror" in unescape(texts[4])


async def test_an_act_needs_the_token_a_reason_and_the_own_origin(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    path = "/console/subscriptions/mailer/do/pause"
    page = await client.get(path, headers=FORM)
    assert "SameSite=Strict" in page.headers["set-cookie"]
    assert "HttpOnly" in page.headers["set-cookie"]
    fields = {"csrf": token_of(page), "reason": "the mailer is moved"}
    assert (await client.post(path, data={**fields, "csrf": "other"})).status_code == 403
    assert (await client.post(path, data={"reason": "no token"})).status_code == 403
    foreign = await client.post(path, data=fields, headers={"origin": "https://evil.example"})
    assert foreign.json()["type"] == "/problems/foreign-origin"
    rebound = await client.get(path, headers={"host": "evil.example"})
    assert rebound.json()["type"] == "/problems/host-not-allowed"
    assert (await client.post(path, json=fields)).json()["type"] == "/problems/content-type"
    nameless = await client.post(path, data={**fields, "reason": " "})
    assert (nameless.status_code, "reason" in nameless.text) == (422, True)
    assert await audited(db) == []
    done = await client.post(path, data=fields)
    assert (done.status_code, done.headers["location"][:32]) == (303, "/console/subscriptions/mailer?do")
    assert await audited(db) == [("subscription.pause", "the mailer is moved")]
    assert (await client.get("/subscriptions/mailer")).json()["state"] == "paused"
    client.cookies.clear()
    assert (await client.post(path, data=fields)).status_code == 403


async def test_an_act_that_is_done_says_so_whatever_happens_next(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    page = await client.get("/console/subscriptions/mailer/do/pause", headers=FORM)
    # Another person deletes the subscription as soon as it is paused.
    await db.execute(
        "create function delete_paused() returns trigger language plpgsql as $$ begin "
        "update subscription set deleted_at = now() where subscription_id = new.subscription_id; return null; end $$"
    )
    await db.execute(
        "create constraint trigger paused after update of state on subscription deferrable initially deferred "
        "for each row when (new.state = 'paused') execute function delete_paused()"
    )
    done = await send(client, page, reason="the mailer is moved")
    assert (done.status_code, done.headers["location"].partition("?")[0]) == (303, "/console/subscriptions/mailer")
    assert await audited(db) == [("subscription.pause", "the mailer is moved")]


@pytest.mark.parametrize(
    "path",
    [
        "/console/dead-letters/do/drop?subscription=mailer&ke=order-1030",
        "/console/dead-letters/do/drop?subscription=mailer&message_id={id}-0&topic=other",
        "/console/transactions/do/commit?producer_group=shop&state=in_doubt&key=order-1030",
        "/console/transactions/do/check?producer_group=shop&state=in_doubt&topic=other",
        "/console/transactions/do/reissue?producer_group=shop&source=policy",
        "/console/transactions/do/reissue?producer_group=shop&state=in_doubt",
    ],
)
async def test_an_act_refuses_a_filter_that_it_does_not_have(
    client: httpx.AsyncClient, db: Connection, group: str, path: str
) -> None:
    await subscription(client, "mailer")
    message_id = await committed(client, {"topic": "order", "key": "order-1", "body": 1})
    await bury(db, message_id, "mailer")
    await in_doubt(client, db)
    path = path.format(id=message_id[:36])
    page = await client.get(path, headers=FORM)
    assert page.status_code == 422
    assert path.rpartition("&")[2].partition("=")[0] in page.text
    other = await client.get("/console/subscriptions/mailer/do/pause", headers=FORM)
    fields = {"csrf": token_of(other), "reason": "it was paid", "dead_letters": f"mailer/{message_id}/0"}
    fields["died_before"] = "2030-01-01T00:00:00Z"
    assert (await client.post(path, data=fields)).status_code == 422
    assert await db.fetchval("select count(*) from dead_letter") == 1
    assert await db.fetchval("select count(*) from op") == 1


async def test_only_the_console_itself_says_that_something_is_done(client: httpx.AsyncClient, group: str) -> None:
    await subscription(client, "mailer")
    done = await submit(client, "/console/subscriptions/mailer/do/pause", reason="the mailer is moved")
    said = 'role="status">The subscription is paused.'
    assert said in (await client.get(done.headers["location"], headers=FORM)).text
    forged = done.headers["location"].replace("paused", "deleted")
    for link in (forged, forged.partition("&")[0], "/console?done=Your+key+has+expired&done_code=%C3%A9"):
        page = await client.get(link, headers=FORM)
        assert page.status_code == 200
        assert "deleted" not in page.text
        assert "Your key has expired" not in page.text
    # The sentence belongs to the session.
    client.cookies.clear()
    assert said not in (await client.get(done.headers["location"], headers=FORM)).text


async def test_a_check_in_a_pause_of_its_group_is_not_said_to_be_due(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    one = await half(client, key="order-1030")
    assert "Held until" not in (await client.get("/console/producer-groups/shop")).text
    await db.execute("update producer_group set held_until = '2999-01-01'")
    assert "Held until" in (await client.get("/console/producer-groups/shop")).text
    done = await submit(client, f"/console/transactions/{one}/do/check", reason="asked by phone")
    said = "The producer group asked for no checks until 2999-01-01 00:00:00.000 UTC."
    assert said in (await client.get(done.headers["location"], headers=FORM)).text


async def test_acts_on_transactions(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    first, second, third = [await half(client, key=f"order-{number}") for number in (1030, 1031, 1032)]
    path = f"/console/transactions/{first}/do"
    early = await submit(client, f"{path}/commit", reason="the bank confirmed it")
    assert (early.status_code, "not in doubt yet" in early.text) == (409, True)
    assert (await submit(client, f"{path}/check", reason="asked by phone")).status_code == 303
    assert (await submit(client, f"{path}/commit", reason="the bank confirmed it")).status_code == 303
    assert (await client.get(f"/transactions/{first}")).json()["verdict"]["reason"] == "the bank confirmed it"
    await submit(client, f"/console/transactions/{second}/do/rollback", reason="it was never paid", force="on")
    sent = await submit(client, f"/console/transactions/{second}/do/reissue", reason="it was paid after all")
    again = (await client.get(f"/transactions/{second}")).json()["reissued_as"]
    assert sent.headers["location"].startswith(f"/console/transactions/{again}")
    await submit(client, "/console/transactions/do/check?producer_group=shop&state=half", reason="the shop is back")
    acts = await audited(db)
    assert ("transaction.check", "asked by phone") in acts
    assert ("transaction.check", "the shop is back") in acts
    assert ("transaction.reissue", "it was paid after all") in acts
    assert (await client.get(f"/transactions/{third}")).json()["state"] == "in_doubt"
    over = await client.get(f"/console/transactions/{first}/do/rollback", headers=FORM)
    assert "not possible in this state" in over.text


async def test_rolled_back_transactions_are_reissued_by_a_filter(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    ids = [await half(client, key=f"order-{number}") for number in range(3)]
    for one in ids:
        await submit(client, f"/console/transactions/{one}/do/rollback", reason="it was never paid", force="on")
    born = (await client.get(f"/transactions/{ids[1]}")).json()["born_at"]
    path = f"/console/transactions?{urlencode({'producer_group': 'shop', 'state': 'rolled_back', 'born_after': born})}"
    page = unescape((await client.get(path, headers=FORM)).text)
    [act] = set(re.findall(r'href="(/console/transactions/do/[^"]*)"', page))
    assert act.startswith("/console/transactions/do/reissue?")
    preview = unescape((await client.get(act, headers=FORM)).text)
    assert "<dd>2</dd>" in preview
    assert [one in preview for one in ids] == [False, True, True]
    said = f"halfnote transactions reissue --group shop --born-after {born} --reason … --no-dry-run"
    assert said in preview.replace("'", "")
    for of in ("topic=order", "source=operator", "reissued=true"):
        assert "/do/reissue" not in (await client.get(f"{path}&{of}", headers=FORM)).text
    no_reason = await submit(client, act, reason=" ")
    assert no_reason.status_code == 422
    assert await db.fetchval("select count(*) from reissue") == 0
    done = await submit(client, act, reason="they were paid after all")
    assert (done.status_code, "2+transactions+are+reissued" in done.headers["location"]) == (303, True)
    assert await db.fetchval("select count(*) from reissue") == 2
    assert ("transaction.reissue", "they were paid after all") in await audited(db)
    assert "not possible in this state" in (await client.get(act, headers=FORM)).text


async def in_doubt(client: httpx.AsyncClient, db: Connection) -> str:
    transaction_id = await half(client)
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) values ($1::uuid, 'shop', 1, now())",
        transaction_id,
    )
    return transaction_id


@pytest.mark.parametrize("act", ["commit", "rollback", "check"])
async def test_an_act_by_a_filter_takes_only_the_transactions_that_it_showed(
    client: httpx.AsyncClient, db: Connection, group: str, act: str
) -> None:
    shown = [await in_doubt(client, db) for _ in range(101)]
    page = await client.get(f"/console/transactions/do/{act}?producer_group=shop&state=in_doubt", headers=FORM)
    unseen = await in_doubt(client, db)
    await client.post(f"/transactions/{shown[50]}/verdict", json={"verdict": "commit", "reason": "it was paid"})
    done = await send(client, page, reason="the shop is gone")
    told = parse_qs(urlsplit(done.headers["location"]).query)["done"][0]
    assert told.startswith("99 ")
    assert told.endswith("1 of those shown no longer matched, and is as before.")
    # The newest hundred were shown, and all but one of them still match.
    acted = await db.fetch("select target from audit where detail ->> 'reason' = 'the shop is gone'")
    assert {row["target"] for row in acted} == set(shown[1:]) - {shown[50]}
    assert (await client.get(f"/transactions/{unseen}")).json()["state"] == "in_doubt"
    assert (await client.get(f"/transactions/{unseen}")).json().get("verdict") is None


async def test_a_form_that_names_no_transactions_acts_on_none(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await in_doubt(client, db)
    path = "/console/transactions/do/rollback?producer_group=shop&state=in_doubt"
    page = await client.get(path, headers=FORM)
    refused = await client.post(path, data={"csrf": token_of(page), "reason": "the shop is gone"})
    assert (refused.status_code, "The form names no transactions" in refused.text) == (422, True)
    assert await db.fetchval("select count(*) from op") == 0
    # The page shows them again, to be confirmed.
    assert (await send(client, refused, reason="the shop is gone")).status_code == 303
    assert await db.fetchval("select count(*) from op") == 1


@pytest.mark.parametrize("act", ["redeliver", "drop"])
async def test_an_act_by_a_filter_takes_only_the_dead_letters_that_it_showed(
    client: httpx.AsyncClient, db: Connection, group: str, act: str
) -> None:
    await subscription(client, "mailer")
    ids = [await committed(client, {"topic": "order", "body": number}) for number in range(5)]
    for one in ids[:3]:
        await bury(db, one, "mailer")
    path = f"/console/dead-letters/do/{act}?subscription=mailer"
    page = await client.get(path, headers=FORM)
    await bury(db, ids[3], "mailer", died_at=AT + timedelta(seconds=1))
    await db.execute("delete from dead_letter where transaction_id = $1", UUID(ids[0][:36]))
    done = await send(client, page, reason="test orders")
    told = parse_qs(urlsplit(done.headers["location"]).query)["done"][0]
    word = "dropped" if act == "drop" else "redelivered"
    assert told == f"2 dead letters are {word}. 1 of those shown had been redelivered or dropped before."
    left = await db.fetch("select transaction_id from dead_letter")
    assert [str(row["transaction_id"]) for row in left] == [ids[3][:36]]
    formless = await client.post(path, data={"csrf": token_of(page), "reason": "test orders"})
    assert (formless.status_code, "The form names no dead letters" in formless.text) == (422, True)
    assert await db.fetchval("select count(*) from dead_letter") == 1


@pytest.mark.parametrize("act", ["redeliver", "drop"])
async def test_a_dead_letter_that_is_stored_late_takes_the_place_of_none_that_was_shown(
    client: httpx.AsyncClient, db: Connection, group: str, act: str
) -> None:
    """A worker stores it after the preview, with an earlier time of death, and one of those shown is gone."""
    await subscription(client, "mailer")
    ids = [await committed(client, {"topic": "order", "body": number}) for number in range(4)]
    for number, one in enumerate(ids[:3]):
        await bury(db, one, "mailer", died_at=AT + timedelta(minutes=2 * number), replay=number)
    page = await client.get(f"/console/dead-letters/do/{act}?subscription=mailer", headers=FORM)
    await bury(db, ids[3], "mailer", died_at=AT + timedelta(minutes=1))
    await db.execute("delete from dead_letter where transaction_id = $1", UUID(ids[2][:36]))
    done = await send(client, page, reason="test orders")
    told = parse_qs(urlsplit(done.headers["location"]).query)["done"][0]
    word = "dropped" if act == "drop" else "redelivered"
    assert told == f"2 dead letters are {word}. 1 of those shown had been redelivered or dropped before."
    left = await db.fetch("select transaction_id from dead_letter")
    assert [str(row["transaction_id"]) for row in left] == [ids[3][:36]]


async def test_an_act_by_a_filter_says_that_more_dead_letters_matched(
    client: httpx.AsyncClient, db: Connection, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_acts, "AT_ONCE", 2)
    await subscription(client, "mailer")
    for number in range(3):
        await bury(db, await committed(client, {"topic": "order", "body": number}), "mailer")
    path = "/console/dead-letters/do/drop?subscription=mailer"
    page = await client.get(path, headers=FORM)
    assert "3; the newest 2 at once" in page.text
    done = await send(client, page, reason="test orders")
    told = parse_qs(urlsplit(done.headers["location"]).query)["done"][0]
    assert told == "2 dead letters are dropped. More matched than were shown: repeat the act for the rest."
    done = await submit(client, path, reason="test orders")
    assert parse_qs(urlsplit(done.headers["location"]).query)["done"] == ["1 dead letters are dropped."]


async def test_acts_on_dead_letters(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    ids = [await committed(client, {"topic": "order", "body": number}) for number in range(3)]
    for one in ids:
        await bury(db, one, "mailer")
    path = "/console/dead-letters/do/redeliver?subscription=mailer"
    preview = await client.get(path, headers=FORM)
    assert "3 dead letters" in preview.text
    assert ids[0] in preview.text
    await submit(client, f"{path}&message_id={ids[0]}", reason="one first")
    assert await db.fetchval("select count(*) from dead_letter") == 2
    await submit(client, "/console/dead-letters/do/drop?subscription=mailer", reason="test orders")
    assert await db.fetchval("select count(*) from dead_letter") == 0
    dropped = ("dead_letter.drop", "test orders")
    assert await audited(db) == [("dead_letter.redeliver", "one first"), dropped, dropped]


async def test_a_group_of_dead_letters_is_redelivered_with_its_filter(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer")
    for error in ("no route to 10.0.0.1:80", "no route to 10.0.0.2:80", EVIL):
        await bury(db, await committed(client, {"topic": "order", "body": 1}), "mailer", error=error)
    page = await client.get("/console/dead-letters/groups?subscription=mailer", headers=FORM)
    assert "<script>alert" not in page.text
    text = unescape(page.text)
    assert "no route to #" in text
    assert EVIL in text
    assert "halfnote dead-letters groups --subscription mailer" in text
    acts = [one for one in re.findall(r'href="([^"]*/do/redeliver[^"]*)"', text) if "no+route" in one]
    [act] = dict.fromkeys(acts)
    preview = unescape((await client.get(act, headers=FORM)).text)
    assert "2 dead letters" in preview
    told = "--subscription mailer --because retries_exhausted --error 'no route to #' --yes"
    assert f"halfnote dead-letters redeliver {told}" in preview
    await submit(client, act, reason="the route is back")
    assert await db.fetchval("select count(*) from dead_letter") == 1
    assert ("dead_letter.redeliver", "the route is back") in await audited(db)
    [one] = {one for one in re.findall(r'href="(/console/dead-letters\?[^"]*)"', text) if "no+route" in one}
    assert "No dead letter matches" in (await client.get(one, headers=FORM)).text


async def test_a_change_of_one_field_is_shown_before_it_is_made(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "mailer", rate_per_s=5, retry=[10, 30])
    path = "/console/subscriptions/mailer/do/edit"
    form = dict(re.findall(r'<input(?: type="hidden")? name="([^"]+)" value="([^"]*)"', (await client.get(path)).text))
    assert (form["rate_per_s"], form["was_rate_per_s"], form["retry"]) == ("5", "5", "10, 30")
    fields = {**form, "rate_per_s": "20", "reason": "the receiver is larger"}
    # Another person changes another field meanwhile.
    assert (await client.patch("/subscriptions/mailer", json={"max_in_flight": 7})).status_code == 200
    asked = await client.post(path, data=fields, headers={"origin": "http://localhost"})
    assert asked.status_code == 200
    assert "5 → 20" in unescape(asked.text)
    assert (await client.get("/subscriptions/mailer")).json()["rate_per_s"] == 5.0
    hidden = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', asked.text))
    assert hidden["confirmed"] == "yes"
    confirmed = {**{name: unescape(value) for name, value in hidden.items()}, "reason": "the receiver is larger"}
    done = await client.post(path, data=confirmed, headers={"origin": "http://localhost"})
    assert done.status_code == 303
    shown = (await client.get("/subscriptions/mailer")).json()
    assert (shown["rate_per_s"], shown["retry"], shown["max_in_flight"]) == (20.0, [10.0, 30.0], 7)
    assert shown["destination"]["url"] == "http://127.0.0.1:9/in"
    [detail] = await db.fetch("select detail from audit where what = 'subscription.put' order by audit_id desc limit 1")
    assert "the receiver is larger" in str(detail["detail"])


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, "No field is changed"),
        ({"rate_per_s": "fast"}, "`rate_per_s`"),
        ({"filters": "{"}, "`filters`"),
        ({"filters": "[" * 5000}, "`filters`"),
        ({"shards": "1000"}, "`shards`"),
        ({"topics": ""}, "`topics`"),
        ({"on_dead": "hold"}, "`on_dead`"),
    ],
)
async def test_a_change_that_cannot_be_made_shows_the_form_with_its_fault(
    client: httpx.AsyncClient, group: str, changed: dict[str, str], fault: str
) -> None:
    await subscription(client, "mailer")
    path = "/console/subscriptions/mailer/do/edit"
    page = (await client.get(path)).text
    form = dict(re.findall(r'<input(?: type="hidden")? name="([^"]+)" value="([^"]*)"', page))
    form |= {"ordered": "none", "on_dead": "release", "reason": "a test"}
    refused = await client.post(path, data={**form, **changed}, headers={"origin": "http://localhost"})
    assert refused.status_code == 422, refused.text
    assert fault in unescape(refused.text)
    for name, value in changed.items():
        assert f'value="{escape(value)}"' in refused.text, name


async def test_a_replay_is_counted_before_it_begins(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    for number in range(3):
        await committed(client, {"topic": "order", "body": number})
    await committed(client, {"topic": "refund", "body": 1})
    first, last = await db.fetchrow('select min("offset"), max("offset") from outbox') or (0, 0)
    path = "/console/subscriptions/mailer/do/replay"
    refused = await submit(client, path, since="9" * 5000, until="", reason="a slip")
    assert refused.status_code == 422
    asked = await submit(client, path, since=str(first + 1), until="", reason="the mailer lost them")
    assert asked.status_code == 200
    page = unescape(asked.text)
    assert "Nothing is done yet" in page
    assert f"<dt>offsets</dt><dd>{first + 1} to {last}</dd>" in page
    assert "<dt>messages</dt><dd>2</dd>" in page
    assert await db.fetchval("select count(*) from replay") == 0
    # What comes between the count and the act is not sent.
    await committed(client, {"topic": "order", "body": 4})
    hidden = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page))
    assert (hidden["since"], hidden["until"], hidden["confirmed"]) == (str(first + 1), str(last), "yes")
    origin = {"origin": "http://localhost"}
    done = await client.post(path, data={**hidden, "reason": "the mailer lost them"}, headers=origin)
    assert done.status_code == 303, done.text
    row = await db.fetchrow("select after, until, reason from replay")
    assert row is not None
    assert tuple(row) == (first, last, "the mailer lost them")
    assert ("subscription.replay", "the mailer lost them") in await audited(db)
    # A second click.
    twice = await client.post(path, data={**hidden, "reason": "the mailer lost them"}, headers=origin)
    assert twice.status_code == 409
    assert "sends the same messages" in twice.text
    # Another person, for whom one message more was counted.
    counted = unescape((await submit(client, path, since=str(first + 1), until="", reason="lost")).text)
    other = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', counted))
    assert other["until"] == str(last + 1)
    also = await client.post(path, data={**other, "reason": "lost"}, headers=origin)
    assert (also.status_code, "sends the same messages" in also.text) == (409, True)
    # Who names the end gets it.
    end = await submit(client, path, since=str(first + 1), until=str(last + 1), confirmed="yes", reason="one more")
    assert end.status_code == 303
    for since in (str(last + 9), "yesterday", "²"):
        refused = await submit(client, path, since=since, reason="x")
        assert (refused.status_code, "from" in refused.text) == (422, True), since


async def test_an_open_breaker_is_reset(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    path = "/console/subscriptions/mailer/do/reset-breaker"
    assert "not possible in this state" in (await client.get(path, headers=FORM)).text
    await db.execute("update checkpoint set opened_at = now(), opened_because = 'answered 503'")
    assert path in (await client.get("/console/subscriptions/mailer", headers=FORM)).text
    done = await submit(client, path, reason="the receiver is repaired")
    assert done.status_code == 303
    assert await db.fetchval("select opened_at from checkpoint") is None
    assert ("subscription.reset_breaker", "the receiver is repaired") in await audited(db)
    await db.execute("update checkpoint set limited_since = now(), paused_until = now() + interval '200 s'")
    page = (await client.get("/console/subscriptions/mailer", headers=FORM)).text
    assert "The destination asks for pauses; the last one ends" in page
    assert (await submit(client, path, reason="the receiver has more room")).status_code == 303
    assert await db.fetchval("select num_nonnulls(limited_since, paused_until) from checkpoint") == 0


async def test_saved_filters_are_of_who_decided(client: httpx.AsyncClient, group: str) -> None:
    transaction_id = await half(client, key="order-1030")
    verdict = {"verdict": "rollback", "reason": "asked the bank", "force": True}
    assert (await client.post(f"/transactions/{transaction_id}/verdict", json=verdict)).status_code == 200
    for query, name, said, found in (
        ("source=operator", "By a person", "--source operator", True),
        ("source=policy", "By policy", "--source policy", False),
        ("refused_end=true", "Late end refused", "--refused-end", False),
    ):
        page = unescape((await client.get(f"/console/transactions?{query}", headers=FORM)).text)
        assert f'?{query}" aria-current="true">{name}</a>' in page
        assert f"halfnote transactions list {said}" in page
        assert (transaction_id in page) == found


async def test_lists_are_sorted_and_say_how_many_they_have(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    for name in ("mailer", "crm", "audit"):
        await subscription(client, name)
    message_id = await committed(client, {"topic": "order", "key": "order-1030", "body": 1})
    await bury(db, message_id, "mailer")
    await bury(db, message_id, "crm", error="no route", died_at=AT - timedelta(hours=1))
    ids = [await half(client, key=f"order-{number}") for number in range(3)]

    async def shown(path: str, pattern: str) -> tuple[list[str], str | None, str]:
        answer = await client.get(f"/console/{path}", headers=FORM)
        assert answer.status_code == 200, answer.text
        said = re.search(r"<h1>[^<]*<small>([^<]*)</small></h1>", answer.text)
        page = unescape(answer.text)
        return list(dict.fromkeys(re.findall(pattern, page))), said and said[1], page

    names = r'<td><a href="/console/subscriptions/([a-z]+)">'
    for sort, wanted in (("", ["audit", "crm", "mailer"]), ("?sort=dead", ["crm", "mailer", "audit"])):
        found, total, page = await shown(f"subscriptions{sort}", names)
        assert (found, total) == (wanted, "3")
        assert f"halfnote subscriptions list{' --sort dead' if sort else ''}" in page
    assert '<th class="n" aria-sort="descending"><a href="/console/subscriptions?sort=dead">' in page
    transactions = r'href="/console/transactions/([0-9a-f-]{36})"'
    found, total, page = await shown("transactions?state=half", transactions)
    assert (found, total) == (ids[::-1], "3")
    assert 'href="/console/transactions?state=half&sort=oldest"' in page
    found, total, page = await shown("transactions?state=half&sort=oldest", transactions)
    assert (found, total) == (ids, "3")
    assert "halfnote transactions list --state half --sort oldest" in page
    # Halfnote's own messages would be in the number.
    assert (await shown("transactions", transactions))[1] is None
    assert (await shown("producer-groups?sort=undecided", "shop"))[1] == "1"
    assert (await shown("topics?sort=messages", "order"))[1] == "1"
    assert (await shown("dead-letters", "order-1030"))[1] == "2"
    assert (await shown("dead-letters?error=no+route", "order-1030"))[1] == "1"
    errors = r'<td class="error">([^<]*)</td>'
    assert (await shown("dead-letters/groups?sort=first", errors))[0] == ["no route", "answered 500"]
    found, _, page = await shown("dead-letters/groups?sort=last", errors)
    assert found == ["answered 500", "no route"]
    assert "halfnote dead-letters groups --sort last" in page
    for name in ("prometheus", "grafana"):
        assert (await client.post("/api-keys", json={"name": name, "role": "metrics"})).status_code == 201
    keys = r'<a href="/console/audit\?key_id=\d+">([a-z]+)</a>'
    assert (await shown("keys", keys))[:2] == (["grafana", "prometheus"], "2")
    await db.execute("update api_key set last_used_at = now() where name = 'prometheus'")
    found, _, page = await shown("keys?sort=used", keys)
    assert (found, "halfnote keys list --sort used" in page) == (["prometheus", "grafana"], True)
    acts = r'<a href="/console/audit\?[^"]*what=[^"]*">([a-z_.]+)</a>'
    await client.put("/topics/refund")
    found, total, page = await shown("audit?what=api_key.create", acts)
    assert (found, total) == (["api_key.create"], "2")
    assert 'href="/console/audit?what=api_key.create&sort=oldest"' in page
    newest, oldest = [re.findall(acts, (await shown(f"audit{sort}", acts))[2]) for sort in ("", "?sort=oldest")]
    assert (newest, newest[0]) == (oldest[::-1], "topic.declare")
    await find(db, "parked", "a")
    assert "<small>findings</small> <small>1</small></h1>" in (await shown("findings", "parked"))[2]
    refused = await client.get("/console/subscriptions?sort=nothing", headers=FORM)
    assert (refused.status_code, "`sort`" in refused.text) == (422, True)


async def test_a_secret_is_shown_once_and_never_in_the_url(client: httpx.AsyncClient, group: str) -> None:
    await subscription(client, "mailer")
    rotated = await submit(client, "/console/subscriptions/mailer/do/rotate-secret", reason="it leaked")
    assert rotated.status_code == 200
    [secret] = re.findall(r"whsec_[\w+/=]+", unescape(rotated.text))
    assert secret not in (await client.get("/console/subscriptions/mailer", headers=FORM)).text


async def test_a_message_is_sent_again_from_its_reason(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    message_id = await committed(client, {"topic": "order", "key": "order-1030", "body": 1})
    await subscription(client, "late")
    page = unescape((await client.get(f"/console/transactions/{message_id[:36]}", headers=FORM)).text)
    [act] = set(re.findall(r'href="(/console/transactions/[0-9a-f-]+/do/replay[^"]*)"', page))
    assert act.endswith("?subscription=late&position=0")
    preview = unescape((await client.get(act, headers=FORM)).text)
    assert f"halfnote transactions replay {message_id[:36]} --subscription late --position 0" in preview
    refused = await submit(client, act.replace("position=0", f"position={'9' * 5000}"), reason="a slip")
    assert (refused.status_code, "`position`" in unescape(refused.text)) == (422, True)
    done = await submit(client, act, reason="it began too late")
    assert done.status_code == 303
    assert await db.fetchval("select reason from replay") == "it began too late"
    assert ("transaction.replay", "it began too late") in await audited(db)


async def test_the_overview_draws_figures_over_time(client: httpx.AsyncClient, db: Connection) -> None:
    await db.execute(
        "insert into stats_minute (minute, halves, in_doubt) "
        "select date_trunc('minute', now()) - n * interval '1 min', 60 * n, n from generate_series(1, 3000) n"
    )
    for asked, label in (("", "24 hours"), ("?range=1h", "1 hour"), ("?range=7d", "7 days")):
        page = (await client.get(f"/console{asked}", headers=FORM)).text
        assert f'aria-current="true">{label}</a>' in page
        assert page.count('<path class="line"') >= 2
        assert "Halves per second: last" in page
    assert 'aria-current="true">24 hours</a>' in (await client.get("/console?range=x", headers=FORM)).text


async def test_each_list_has_its_columns_in_csv(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for name in ("mailer", "crm"):
        await subscription(client, name, topics=["order", "refund"])
    message_id = await committed(client, {"topic": "order", "key": "order-1030", "body": 1})
    await bury(db, message_id, "mailer")
    destination = "webhook http://127.0.0.1:9/in"
    for path, wanted in (
        ("subscriptions", {"name": "crm", "state": "active", "topics": "order refund", "destination": destination}),
        ("topics", {"topic": "order", "subscriptions": "crm mailer"}),
        ("producer-groups", {"name": "shop", "check_urls": "http://127.0.0.1:9/check"}),
        ("dead-letters", {"subscription": "mailer", "message_id": message_id, "key": "order-1030", "status": "500"}),
        ("dead-letters/groups", {"subscription": "mailer", "error": "answered 500", "count": "1"}),
        ("transactions", {"transaction_id": message_id[:36], "state": "committed", "key": "order-1030"}),
        ("audit", {"what": "subscription.put", "target": "crm"}),
    ):
        answer = await client.get(f"/console/{path}", params={"format": "csv"}, headers=FORM)
        assert answer.headers["content-disposition"] == f'attachment; filename="halfnote-{FILES.get(path, path)}.csv"'
        first = next(csv.DictReader(StringIO(answer.text)))
        assert {name: first[name] for name in wanted} == wanted
    refused = await client.get("/console/dead-letters?died_after=yesterday", headers=FORM)
    assert refused.status_code == 422
    assert "`died_after`: a time is RFC 3339" in unescape(refused.text)


async def test_the_command_of_an_act_is_one_that_exists(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await subscription(client, "mailer")
    await bury(db, await committed(client, {"topic": "order", "body": 1}), "mailer")
    page = (await client.get("/console/dead-letters/do/drop?subscription=mailer", headers=FORM)).text
    assert "halfnote dead-letters drop --subscription mailer --yes" in unescape(page)


async def test_lists_are_csv_without_formulas(client: httpx.AsyncClient, group: str) -> None:
    await half(client, key="=1+1")
    answer = await client.get("/console/transactions?format=csv&state=half")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    header, row = answer.text.splitlines()
    assert header.startswith("transaction_id,producer_group,state")
    assert ",'=1+1," in row


async def test_a_file_has_all_rows_or_says_where_the_list_goes_on(client: httpx.AsyncClient, db: Connection) -> None:
    made = """insert into audit (at, actor, key_id, role, what, target, detail)
        select $1, 'ann', 7, 'admin', 'topic.declare', $2, $3::text::jsonb from generate_series(1, $4::int)"""
    detail = {"reason": 'a "ä"', "more": None, "flag": True}
    await db.execute(made, AT, "some", json.dumps(detail), 1001)
    await db.execute(made, AT, "many", "{}", 10_050)

    whole = await client.get("/console/audit?format=csv&target=some", headers=FORM)
    assert whole.headers["content-disposition"] == 'attachment; filename="halfnote-audit.csv"'
    rows = list(csv.DictReader(StringIO(whole.text)))
    assert [json.loads(row["detail"]) for row in rows] == [detail] * 1001

    part = await client.get("/console/audit?format=csv&target=many", headers=FORM)
    assert part.headers["content-disposition"] == 'attachment; filename="halfnote-audit-incomplete.csv"'
    *rows, last = csv.DictReader(StringIO(part.text))
    found = re.fullmatch(r"This file is not complete\. The list goes on at (/\S+)", last["audit_id"])
    assert found is not None, last
    rest = await client.get(found[1], headers=FORM)
    rows += csv.DictReader(StringIO(rest.text))
    ids = [int(row["audit_id"]) for row in rows]
    assert (len(set(ids)), ids) == (10_050, sorted(ids, reverse=True))


async def test_the_other_files_say_what_they_lack(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for number in range(60):
        await subscription(client, f"mailer-{number}")
    found = await client.get("/console/search?q=mailer&format=csv", headers=FORM)
    assert found.text.splitlines()[-1].startswith("This file is not complete. More is found")
    await reconciled(db, "findings", *(DAY - timedelta(days=number) for number in range(40)))
    days = (await client.get("/console/proof?format=csv", headers=FORM)).text.splitlines()
    assert (len(days), days[-1].startswith("This file")) == (41, False)
    await bury(db, await committed(client, {"topic": "order", "body": 1}), "mailer-1")
    groups = (await client.get("/console/dead-letters/groups?format=csv", headers=FORM)).text.splitlines()
    assert (len(groups), groups[-1].startswith("mailer-1,")) == (2, True)


async def test_a_list_shows_its_command_and_a_wrong_filter_its_fault(client: httpx.AsyncClient, group: str) -> None:
    page = await client.get("/console/transactions?state=parked&key=order 1030", headers=FORM)
    assert "halfnote transactions list --state parked --key 'order 1030'" in unescape(page.text)
    wrong = await client.get("/console/transactions?born_after=yesterday", headers=FORM)
    assert (wrong.status_code, "born_after" in wrong.text) == (422, True)
    assert (await client.get("/console/nothing", headers=FORM)).status_code == 404
    assert (await client.post("/console", data={"csrf": "x"})).status_code == 405


async def test_a_body_is_shown_as_it_is(client: httpx.AsyncClient, group: str) -> None:
    number = '{"total": 12.500000000000000000001}'
    made = await client.post(
        "/half",
        content=f'{{"producer_group": "shop", "messages": [{{"topic": "order", "body": {number}}}, '
        '{"topic": "order", "content_type": "image/png", "body_base64": "iVBORw0KGgoAAQ=="}]}',
        headers={"content-type": "application/json"},
    )
    page = unescape((await client.get(f"/console/transactions/{made.json()['transaction_id']}", headers=FORM)).text)
    assert '"total": 12.500000000000000000001' in page
    assert "00000000  89 50 4e 47 0d 0a 1a 0a 00 01" in page


@pytest.mark.parametrize("path", ["/docs", "/console"])
async def test_no_page_names_another_host(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path, headers=FORM)
    assert re.findall(r'(?:src|href)="(?:https?:)?//[^"]*', answer.text) == []
    for file in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', answer.text):
        found = await client.get(file)
        assert found.status_code == 200
        cached = await client.get(file, headers={"if-none-match": found.headers["etag"]})
        assert cached.status_code == 304


@pytest.mark.parametrize("kind", ["subscriptions", "producer-groups"])
async def test_a_second_rotation_within_a_day_says_that_the_first_ends(
    client: httpx.AsyncClient, runtime: Runtime, kind: str
) -> None:
    await subscription(client, "mailer")
    await client.put("/producer-groups/mailer", json={"check_urls": ["http://127.0.0.1:9/check"]})
    path = f"/console/{kind}/mailer/do/rotate-secret"
    runtime.clock.fixed = at = datetime.now(UTC)

    async def preview() -> str:
        return unescape((await client.get(path, headers=FORM)).text)

    warning = "The current secret is less than 24 hours old"
    assert warning not in await preview()
    first = await submit(client, path, reason="it leaked")
    assert "signs until" not in first.text
    shown = await preview()
    ends_at = exact(at + timedelta(hours=24))
    assert warning in shown
    assert f"<dt>a former secret signs until</dt><dd>{ends_at}</dd>" in shown
    assert "whsec_" not in shown
    runtime.clock.fixed = at + timedelta(hours=23)
    # The answer says it as well.
    second = await submit(client, path, reason="it leaked, too")
    assert f"<dt>an earlier secret signs until</dt><dd>{ends_at}</dd>" in unescape(second.text)
    answer = (await client.post(f"/{kind}/mailer/rotate-secret")).json()
    ends = [datetime.fromisoformat(answer[name]) - at for name in ("earlier_signs_until", "former_signs_until")]
    # Of the earlier ones the one that signs longest.
    assert ends == [timedelta(hours=47), timedelta(hours=47)]
    runtime.clock.fixed = at + timedelta(hours=48)
    assert warning not in await preview()
    assert (await client.post(f"/{kind}/mailer/rotate-secret")).json()["earlier_signs_until"] is None
