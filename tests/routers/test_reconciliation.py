"""The nightly proof over HTTP: its state by day, its runs and findings, in pages and by filters."""

import json
from datetime import date, timedelta
from hashlib import sha256
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.errors import TYPE_PREFIX
from app.finding_kinds import MEANINGS, Kind
from app.loops import gauges
from app.runtime.state import Runtime
from app.store.proof.findings import (
    COUNT,
    FLOOR,
    HIGHEST,
    LOWEST,
    MARK_ANNOUNCED,
    ONE,
    OWN_PLANS,
    PAGE,
    WINDOW_ROWS,
    FindingFilter,
    count_findings,
    list_findings,
)
from tests.support.days import subscribe
from tests.support.explain import scans
from tests.support.processes import ROOT
from tests.support.proof_runs import AT, DAY, ID, SCORE, find, find_many, looked_at, reconciled, resolve

STAMP = "2026-11-21T03:00:00Z"
BEFORE = DAY - timedelta(days=1)


async def get(client: httpx.AsyncClient, path: str, **query: Any) -> Any:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def every(client: httpx.AsyncClient, **query: Any) -> list[str]:
    """Return the subjects of all pages of a list of findings."""
    found, cursor = [], None
    while True:
        page = await get(client, "/findings", **query, **({"cursor": cursor} if cursor else {}))
        found += [one["subject"] for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def test_before_the_first_run(client: httpx.AsyncClient) -> None:
    assert await get(client, "/reconciliation") == {
        "verdict": None,
        "run": None,
        "proved_at": None,
        "open": {},
        "provisional": 0,
        "final": 0,
        "runs": {"items": [], "next_cursor": None},
        "days": {"items": [], "next_cursor": None},
    }
    assert await get(client, "/findings") == {"items": [], "next_cursor": None}
    answer = await client.get(f"/reconciliation/{DAY}")
    assert answer.status_code == 404
    assert answer.json()["type"] == f"{TYPE_PREFIX}day-not-reconciled"
    assert answer.json()["days"] == []
    assert "halfnote reconcile" in answer.json()["detail"]


async def test_a_certificate_is_answered_byte_for_byte(client: httpx.AsyncClient, db: Connection) -> None:
    answer = await client.get(f"/reconciliation/{DAY}/certificate")
    assert (answer.status_code, answer.json()["type"]) == (404, f"{TYPE_PREFIX}day-not-certified")
    document = '{"certificate":{"day":"2026-11-20"},"signature":null}\n'
    await db.execute("insert into day_certificate values (1, $1, 1, $2)", DAY, document)
    answer = await client.get(f"/reconciliation/{DAY}/certificate")
    assert (answer.status_code, answer.text) == (200, document)
    assert answer.headers["content-type"] == "application/json"


def certificate(day: date, sequence: int, previous: str | None, key: str | None = None) -> str:
    before = None
    if previous is not None:
        before = {"day": json.loads(previous)["certificate"]["day"], "digest": sha256(previous.encode()).hexdigest()}
    body = {"day": str(day), "sequence": sequence, "previous": before}
    return json.dumps({"certificate": body, "signature": key and {"public_key": key}})


async def test_certificates_are_listed_with_what_continues_the_chain(client: httpx.AsyncClient, db: Connection) -> None:
    async def put(*documents: str) -> None:
        await db.execute("delete from day_certificate")
        for number, document in enumerate(documents):
            statement = "insert into day_certificate values ($1, $2, 1, $3)"
            await db.execute(statement, number + 1, BEFORE + timedelta(days=number), document)

    async def chain(**query: Any) -> list[str]:
        return [one["chain"] for one in (await get(client, "/reconciliation/certificates", **query))["items"]]

    days = [BEFORE + timedelta(days=number) for number in range(3)]
    first = certificate(days[0], 1, None)
    second = certificate(days[1], 2, first, "d75a")
    third = certificate(days[2], 3, second)
    await put(first, second, third)
    page = await get(client, "/reconciliation/certificates", limit=2)
    digest = sha256(second.encode()).hexdigest()
    assert page["items"][1] == {
        "day": str(days[1]), "sequence": 2, "digest": digest, "public_key": "d75a", "chain": "ok"
    }  # fmt: skip
    rest = await get(client, "/reconciliation/certificates", before=page["next_cursor"])
    assert ([one["chain"] for one in rest["items"]], rest["next_cursor"]) == (["first"], None)
    assert await chain(since=days[1]) == ["ok", "ok"]

    await put(first + " ", second, third)
    assert await chain() == ["ok", "broken", "first"]
    # One is missing, has the number or the day of another, or cannot be read.
    await put(first, third)
    assert await chain() == ["broken", "first"]
    await put(first, certificate(days[1], 7, first), certificate(days[1], 3, second), "{}", "no JSON")
    assert await chain() == ["broken"] * 4 + ["first"]
    for wrong in ({"limit": 101}, {"since": "yesterday"}, {"before": 0}):
        assert (await client.get("/reconciliation/certificates", params=wrong)).status_code == 422


async def test_how_it_stands(client: httpx.AsyncClient, db: Connection) -> None:
    await reconciled(db, "proved", BEFORE)
    run_id = await reconciled(db, "findings", BEFORE, DAY, open=2, new=2, ended_at=AT + timedelta(days=1))
    await looked_at(db, BEFORE, run_id, "final")
    await looked_at(db, DAY, run_id, parked=2)
    await find(db, "parked", ID)
    await find(db, "parked", f"{ID}0")
    await find(db, "unrouted", "ordre")
    await resolve(db, "ordre")
    failed = await reconciled(db, "failed", seen_at=None, error="the database went away")
    stands = await get(client, "/reconciliation")
    assert stands["verdict"] == "failed"
    assert stands["run"] == stands["runs"]["items"][0]
    assert stands["run"]["error"] == "the database went away"
    assert "seen_at" not in stands["run"]
    assert [one["run_id"] for one in stands["runs"]["items"]] == [failed, run_id, run_id - 1]
    assert stands["runs"]["items"][1] == {
        "run_id": run_id,
        "state": "findings",
        "engine": "local[2]",
        "source": "primary",
        "seen_at": STAMP,
        "started_at": "2026-11-22T02:58:30Z",
        "ended_at": "2026-11-22T03:00:00Z",
        "days": [str(BEFORE), str(DAY)],
        "open": 2,
        "new": 2,
        "resolved": 0,
        "seconds": {"read": 8.5, "join": 12.0},
    }
    assert (stands["proved_at"], stands["open"]) == (STAMP, {"parked": 2})
    assert (stands["provisional"], stands["final"]) == (1, 1)
    assert stands["days"]["items"] == [
        {
            "day": str(DAY),
            "state": "provisional",
            "run_id": run_id,
            "reconciled_at": STAMP,
            "counts": {"half": 1030, "op": 1030},
            "found": {"parked": 2},
            "score": SCORE,
        },
        {
            "day": str(BEFORE),
            "state": "final",
            "run_id": run_id,
            "reconciled_at": STAMP,
            "counts": {"half": 1030, "op": 1030},
            "found": {},
            "score": SCORE,
        },
    ]


async def test_pages_of_runs_and_of_days(client: httpx.AsyncClient, db: Connection) -> None:
    days = [DAY - timedelta(days=back) for back in range(5)]
    run_ids = [await reconciled(db, "proved", day) for day in days]
    runs: list[int] = []
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    for _ in range(3):
        page = await get(client, "/reconciliation", **query)
        runs += [one["run_id"] for one in page["runs"]["items"]]
        seen += [one["day"] for one in page["days"]["items"]]
        assert page["run"]["run_id"] == run_ids[-1]
        cursors = page["runs"]["next_cursor"], page["days"]["next_cursor"]
        query |= {"runs_before": cursors[0], "days_before": cursors[1]}
    assert cursors == (None, None)
    assert runs == run_ids[::-1]
    assert seen == [str(day) for day in days]


async def test_one_day_with_its_figures_and_its_runs(client: httpx.AsyncClient, db: Connection) -> None:
    first = await reconciled(db, "proved", BEFORE, DAY)
    await reconciled(db, "proved", BEFORE)
    second = await reconciled(db, "findings", DAY)
    shown = await get(client, f"/reconciliation/{DAY}")
    assert [run["run_id"] for run in shown.pop("runs")] == [second, first]
    assert shown == {
        "day": str(DAY),
        "state": "provisional",
        "run_id": second,
        "reconciled_at": STAMP,
        "counts": {"half": 1030, "op": 1030},
        "found": {},
        "score": SCORE,
        "figures": {"hours": [{"hour": 8, "committed": 1030}]},
    }


async def test_another_day_is_told_which_there_are(client: httpx.AsyncClient, db: Connection) -> None:
    await reconciled(db, "proved", BEFORE, DAY)
    answer = await client.get(f"/reconciliation/{DAY + timedelta(days=1)}")
    assert answer.status_code == 404
    assert answer.json()["days"] == [str(DAY), str(BEFORE)]
    for wrong in ("yesterday", "20261120", "2026-11-31", "1700000000", "2026-11-20T00:00:00Z"):
        answer = await client.get(f"/reconciliation/{wrong}")
        assert (answer.status_code, answer.json()["type"]) == (422, f"{TYPE_PREFIX}invalid"), wrong


async def test_a_finding_is_shown_with_what_it_is_about(client: httpx.AsyncClient, db: Connection) -> None:
    subscription_id = await subscribe(db, "mailer", "order")
    finding_id = await find(
        db,
        "undelivered",
        f"{ID}-0:{subscription_id}",
        transaction_id=ID,
        position=0,
        subscription_id=subscription_id,
        producer_group="shop",
        detail='{"offset": 1030}',
    )
    shown = {
        "finding_id": finding_id,
        "day": str(DAY),
        "kind": "undelivered",
        "state": "open",
        "subject": f"{ID}-0:{subscription_id}",
        "transaction_id": ID,
        "message_id": f"{ID}-0",
        "subscription": "mailer",
        "producer_group": "shop",
        "detail": {"offset": 1030},
        "first_run": 1,
        "first_seen_at": STAMP,
        "last_run": 1,
        "last_seen_at": STAMP,
        "docs": "/findings/kinds/undelivered",
        "transaction": f"/transactions/{ID}",
    }
    assert (await get(client, "/findings"))["items"] == [shown]
    await db.execute("update subscription set deleted_at = now()")
    assert await get(client, f"/findings/{finding_id}") == shown
    await resolve(db, shown["subject"])
    shown |= {"state": "resolved", "resolved_run": 2, "resolved_at": STAMP}
    assert await get(client, f"/findings/{finding_id}") == shown
    answer = await client.get(f"/findings/{finding_id + 1}")
    assert (answer.status_code, answer.json()["type"]) == (404, f"{TYPE_PREFIX}finding-unknown")


async def test_a_finding_without_a_transaction_names_none(client: httpx.AsyncClient, db: Connection) -> None:
    await find(db, "unrouted", "ordre", detail='{"messages": 3}')
    [shown] = (await get(client, "/findings"))["items"]
    assert not {"transaction", "transaction_id", "message_id", "subscription", "producer_group"} & shown.keys()


async def test_findings_by_filter(client: httpx.AsyncClient, db: Connection) -> None:
    await find(db, "parked", "a", DAY)
    await find(db, "parked", "b", BEFORE)
    await find(db, "unrouted", "c", DAY)
    await find(db, "unrouted", "d", DAY)
    await resolve(db, "d")
    assert await every(client) == ["d", "c", "a", "b"]
    assert await every(client, day=str(DAY)) == ["d", "c", "a"]
    assert await every(client, day=str(DAY), kind="unrouted") == ["d", "c"]
    assert await every(client, kind="parked") == ["a", "b"]
    assert await every(client, state="open") == ["c", "a", "b"]
    assert await every(client, state="resolved") == ["d"]
    assert await every(client, day=str(BEFORE), kind="parked", state="resolved") == []
    for query, count in (({}, 4), ({"day": str(DAY)}, 3), ({"kind": "parked"}, 2), ({"state": "resolved"}, 1)):
        page = await get(client, "/findings", limit=1, count="true", **query)
        assert page["total"] == {"count": count, "exact": True}, query
        if page["next_cursor"]:
            rest = await get(client, "/findings", limit=1, count="true", cursor=page["next_cursor"], **query)
            assert rest["total"] == page["total"]
    assert "total" not in await get(client, "/findings")
    for query in ({"kind": "lost"}, {"state": "old"}, {"day": "today"}, {"cursor": "x"}, {"limit": 0}):
        assert (await client.get("/findings", params=query)).status_code == 422, query


async def test_pages_of_findings_are_whole_whatever_the_subjects(client: httpx.AsyncClient, db: Connection) -> None:
    subjects = ["order", "order.é", "a b%2F?", "\U0001f600", "x" * 255, ".", "%"]
    for subject in subjects:
        await find(db, "unrouted", subject)
    await find_many(db, "parked", 5, BEFORE)
    found = await every(client, limit=1)
    assert sorted(found) == sorted(subjects + [f"parked-{n}" for n in range(1, 6)])
    assert found == await every(client, limit=1000)
    # A finding that is resolved or deleted between two pages does not end the list.
    page = await get(client, "/findings", limit=3)
    await db.execute("delete from finding where subject = $1", page["items"][-1]["subject"])
    rest = await every(client, cursor=page["next_cursor"])
    assert [one["subject"] for one in page["items"]] + rest == found


async def test_a_page_ends_when_its_time_is_over(db: Connection) -> None:
    await find_many(db, "parked", WINDOW_ROWS * 2 + 10)
    await find(db, "op_without_half", "the one")
    wanted, turns, found = FindingFilter(kind="op_without_half"), 0, []
    while wanted is not None:
        rows, below = await list_findings(db, wanted, 10, scan_s=0)
        found += [row.subject for row in rows]
        turns += 1
        if below is None:
            break
        wanted = FindingFilter(kind="op_without_half", below=below)
    assert (turns, found) == (3, ["the one"])
    rows, below = await list_findings(db, FindingFilter(kind="op_without_half"), 10)
    assert ([row.subject for row in rows], below) == (["the one"], None)
    stored = WINDOW_ROWS * 2 + 11
    assert await count_findings(db, FindingFilter(), stored, scan_s=60) == (stored, True)
    assert await count_findings(db, FindingFilter(), stored - 1, scan_s=60) == (stored - 1, False)
    assert await count_findings(db, FindingFilter(), stored, scan_s=0) == (WINDOW_ROWS, False)
    assert await count_findings(db, FindingFilter(kind="op_without_half"), 10, scan_s=60) == (1, True)


WINDOW = ["date", "text", "text", "date", "text"]


async def test_what_is_asked_about_findings_is_a_short_index_range(db: Connection) -> None:
    for back in range(10):
        await find_many(db, "parked", 3000, DAY - timedelta(days=back))
        await find_many(db, "unrouted", 3000, DAY - timedelta(days=back))
    await db.execute("vacuum analyze finding")
    await db.execute(OWN_PLANS.replace("set local", "set"))
    for wanted in (
        FindingFilter(),
        FindingFilter(day=BEFORE),
        FindingFilter(day=BEFORE, kind="parked"),
        FindingFilter(kind="parked"),
    ):
        found = await scans(db, FLOOR, WINDOW, wanted.range, generic=False)
        assert {scan.index for scan in found} == {"finding_subject"}
        assert sum(scan.rows for scan in found) <= WINDOW_ROWS + 1
        floor = await db.fetchrow(FLOOR, *wanted.range)
        for low in (floor, LOWEST) if wanted.kind is None or wanted.day else (floor,):
            bounds = (*wanted.range, *((low.day, low.kind, low.subject) if low is LOWEST else low), None, 101)
            for statement in (PAGE, COUNT):
                types = [*WINDOW, "date", "text", "text", "bool", "bigint"]
                mine = [
                    one for one in await scans(db, statement, types, bounds, generic=False) if one.table == "finding"
                ]
                assert {scan.index for scan in mine} == {"finding_subject"}
                assert sum(scan.rows for scan in mine) <= (WINDOW_ROWS if wanted.kind else 102)
    await db.execute("reset all")
    for generic in (False, True):
        found = await scans(db, ONE, ["bigint"], (7,), generic=generic)
        assert {scan.index for scan in found if scan.table == "finding"} == {"finding_pkey"}
    await db.execute("update finding set announced_at = now()")
    await find_many(db, "half_stuck", 20)
    await db.execute("vacuum analyze finding")
    for generic in (False, True):
        found = await scans(db, MARK_ANNOUNCED, ["timestamptz", "int"], (AT, 10_000), generic=generic)
        assert not [scan for scan in found if scan.node == "Seq Scan"]
        assert sum(scan.rows for scan in found if scan.table == "finding") <= 100
    assert HIGHEST.day == date.max


async def test_every_kind_is_explained(client: httpx.AsyncClient) -> None:
    assert set(MEANINGS) == set(Kind)
    for kind in Kind:
        text = (await client.get(f"/findings/kinds/{kind}")).text
        assert text.splitlines()[0] == kind
        assert MEANINGS[kind].means in text
        assert (ROOT / "docs" / "findings" / f"{kind}.md").read_text().startswith(f"# {kind}\n")
    answer = await client.get("/findings/kinds/lost")
    assert answer.status_code == 404
    assert "half_stuck" in answer.json()["detail"]


async def test_the_gauges_tell_of_it(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    async def shown() -> dict[str, str]:
        await gauges.step(runtime, AT + timedelta(hours=1))
        lines = (await client.get("/metrics")).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith("halfnote_reconciliation_"))
        return {series.removeprefix("halfnote_reconciliation_"): value for series, _, value in pairs}

    before = await shown()
    assert before["age_seconds"] == before["proved_age_seconds"] == "+Inf"
    await reconciled(db, "proved", BEFORE, ended_at=AT - timedelta(days=1))
    await find(db, "parked", ID)
    run_id = await reconciled(db, "findings", DAY, ended_at=AT)
    await looked_at(db, BEFORE, run_id, "final")
    values = await shown()
    assert values["age_seconds"] == "3600.0"
    assert values["proved_age_seconds"] == str(25 * 3600.0)
    assert values["run_seconds"] == "90.0"
    assert [values[f'state{{state="{one}"}}'] for one in ("proved", "findings", "failed")] == ["0.0", "1.0", "0.0"]
    assert values['findings{kind="parked"}'] == "1.0"
    assert (values['days{state="provisional"}'], values['days{state="final"}']) == ("1.0", "1.0")
    await resolve(db, ID)
    await reconciled(db, "proved", DAY, ended_at=AT + timedelta(minutes=30))
    values = await shown()
    assert values['findings{kind="parked"}'] == "0.0"
    assert values["proved_age_seconds"] == "1800.0"


@pytest.mark.parametrize("path", ["/reconciliation", f"/reconciliation/{DAY}", "/findings", "/findings/1"])
async def test_nothing_is_written_over_http(client: httpx.AsyncClient, path: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        answer = await client.request(method, path, json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
