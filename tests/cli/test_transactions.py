"""`halfnote transactions`: list, show, check, verdict, reissue."""

import io
import time
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest

from app.cli.tables import moment
from tests.support.cli_requests import answering, group, post_end, post_half
from tests.support.cli_runs import Answering, Run, run, run_alone

__all__ = ["group", "run", "run_alone"]


def test_a_list_of_transactions_is_filtered_and_paged(run: Run, url: str, group: str) -> None:
    ids = [post_half(url, group, topic) for topic in ("order", "order", "invoice")]
    post_end(url, group, ids[0], "commit")
    listed = run("transactions", "list", "--group", group)
    assert [transaction_id for transaction_id in ids if transaction_id in listed.out] == ids
    assert "committed" in listed.out
    found = run("transactions", "list", "--group", group, "--state", "committed", "--json").json
    assert [one["transaction_id"] for one in found["items"]] == [ids[0]]
    found = run("transactions", "list", "--group", group, "--topic", "invoice", "--key", "order-1030", "--json").json
    assert [one["transaction_id"] for one in found["items"]] == [ids[2]]
    page = run("transactions", "list", "--group", group, "--limit", "2", "--json").json
    assert len(page["items"]) == 2
    rest = run("transactions", "list", "--group", group, "--cursor", page["next_cursor"], "--json").json
    assert len(rest["items"]) == 1
    assert "--cursor" in run("transactions", "list", "--group", group, "--limit", "2").out


def test_a_transaction_is_shown_with_its_timeline(run: Run, url: str, group: str) -> None:
    # A topic of its own: other tests subscribe to `order`, and their attempts would be on the timeline.
    transaction_id = post_half(url, group, "shown", context={"order": 1030})
    post_end(url, group, transaction_id, "commit")
    shown = run("transactions", "show", transaction_id)
    assert shown.code == 0
    for expected in (
        transaction_id,
        "committed",
        "commit by producer",
        '{"order": 1030}',
        "shown (created)",
        "order-1030",
    ):
        assert expected in shown.out
    lines = [line.split() for line in shown.out.splitlines()]
    whats = [line[2] for line in lines if len(line) > 2 and line[1] == "s"]
    as_json = run("transactions", "show", transaction_id, "--json").json
    assert whats == [entry["what"] for entry in as_json["timeline"]] == ["born", "verdict", "published"]


async def test_a_long_timeline_is_shown_whole(run: Run, url: str, group: str, database: str) -> None:
    transaction_id = post_half(url, group)
    connection = await asyncpg.connect(database)
    # The service's clock may be ahead of the database's by half a round trip, which a busy machine makes long.
    await connection.execute(
        "insert into attempt (transaction_id, kind, at, outcome, number) "
        "select $1, 'check', now() + interval '1 min' + n * interval '1 ms', 'unanswered', n "
        "from generate_series(1, 2100) n order by n",
        UUID(transaction_id),
    )
    await connection.close()
    shown = run("transactions", "show", transaction_id, "--json").json
    numbers = [entry["check"] for entry in shown["timeline"] if entry["what"] == "check"]
    assert (numbers, shown["attempts_cursor"]) == (list(range(1, 2101)), None)
    assert shown["timeline"][0]["what"] == "born"
    assert "no. 2100" in run("transactions", "show", transaction_id).out


async def test_many_deliveries_are_shown_whole(run: Run, url: str, group: str, database: str) -> None:
    name = f"many-{uuid4().hex[:8]}"
    put = {"topics": ["shown-often"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
    # Before the subscription, so that no delivery begins of its own.
    transaction_id = post_half(url, group, "shown-often")
    post_end(url, group, transaction_id, "commit")
    httpx.put(f"{url}/subscriptions/{name}", json=put).raise_for_status()
    httpx.post(f"{url}/subscriptions/{name}/pause").raise_for_status()
    connection = await asyncpg.connect(database)
    await connection.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, status, settled_at, replay) select $1, 0, subscription_id, 1, 'delivered', 1, now(), 7, 204, "
        "now() + interval '1 min' + n * interval '1 ms', n from generate_series(0, 1499) n, subscription "
        "where name = $2",
        UUID(transaction_id),
        name,
    )
    await connection.close()
    shown = run("transactions", "show", transaction_id, "--json").json
    deliveries = shown["messages"][0]["deliveries"]
    assert ([one.get("replay", 0) for one in deliveries], shown["deliveries_cursor"]) == (list(range(1500)), None)
    settled = [one for one in shown["timeline"] if one["what"] in ("delivered", "replayed")]
    assert [one.get("replay", 0) for one in settled] == list(range(1500))
    # As the API says it of those that are in its answer.
    assert settled[-1].keys() == settled[1].keys()
    # Once as a delivery, and once in the timeline.
    words = run("transactions", "show", transaction_id).out.split()
    assert [words.count(word) for word in ("1499:", "1499,")] == [1, 1]
    message = run("messages", "show", f"{transaction_id}-0", "--json").json
    assert (len(message["deliveries"]), message["deliveries_cursor"]) == (1500, None)
    httpx.delete(f"{url}/subscriptions/{name}").raise_for_status()


def test_a_person_asks_decides_and_reissues(run: Run, url: str, group: str) -> None:
    transaction_id = post_half(url, group)
    early = run("transactions", "verdict", "rollback", transaction_id, "--reason", "no")
    assert early.code == 1
    assert "/problems/too-early" in early.err
    asked = run("transactions", "check", transaction_id)
    assert (asked.code, "asks its producer now" in asked.out) == (0, True)
    decided = run("transactions", "verdict", "rollback", transaction_id, "--reason", "told by phone", "--force")
    assert decided.code == 0
    verdict = run("transactions", "show", transaction_id, "--json").json["verdict"]
    assert (verdict["source"], verdict["actor"], verdict["reason"]) == ("operator", "dana", "told by phone")
    again = run("transactions", "verdict", "rollback", transaction_id, "--reason", "told by phone", "--force")
    assert "recorded before" in again.out
    reissued = run("transactions", "reissue", transaction_id, "--reason", "it was paid", "--actor", "kim", "--json")
    assert reissued.code == 0
    assert reissued.json["reissued_from"] == transaction_id
    twice = run("transactions", "reissue", transaction_id, "--reason", "again")
    assert twice.code == 1
    assert reissued.json["transaction_id"] in twice.err


def test_a_check_says_how_long_the_group_has_asked_for_none(run: Run, url: str, group: str) -> None:
    with answering(503, {"retry-after": "3600"}) as busy:
        run("groups", "put", group, "--check-url", busy)
        transaction_id = post_half(url, group)
        assert "asks its producer now" in run("transactions", "check", transaction_id).out
        deadline = time.monotonic() + 60
        while run("groups", "get", group, "--json").json["held_until"] is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        until = moment(run("groups", "get", group, "--json").json["held_until"])
        lines = [line.split() for line in run("groups", "get", group).out.splitlines()]
        assert ["held", "until", *str(until).split()] in lines
        asked = run("transactions", "check", transaction_id)
        assert (asked.code, f"asked for no checks until {until} UTC" in asked.out) == (0, True)
        assert all(len(line) <= 80 for line in asked.out.splitlines())
        run("groups", "put", group, "--check-url", "http://127.0.0.1:9/check")
    assert "held until" not in run("groups", "get", group).out


def test_a_filter_decides_only_what_it_listed(run: Run, url: str, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {post_half(url, group) for _ in range(3)}
    asked = run("transactions", "check", "--group", group, "--state", "half", "--no-dry-run", "--json").json
    assert asked["changed"] == 3
    chosen = ("--group", group, "--state", "in_doubt", "--reason", "flood")
    preview = run("transactions", "verdict", "rollback", *chosen)
    assert "3 would be decided" in preview.out
    assert ids == set(preview.out.split()[:3])
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    refused = run("transactions", "verdict", "rollback", *chosen, "--no-dry-run")
    assert (refused.code, set(refused.out.split())) == (1, ids)
    assert "3 transactions will get the verdict rollback, for good. Go on?" in refused.err
    assert "Nothing was done." in refused.err
    later: list[str] = []

    def one_more_is_in_doubt() -> None:
        later.append(post_half(url, group))
        assert run("transactions", "check", later[0]).code == 0

    monkeypatch.setattr("sys.stdin", Answering(one_more_is_in_doubt))
    done = run("transactions", "verdict", "rollback", *chosen, "--no-dry-run")
    assert "3 of 3 were decided" in done.out
    assert set(run("transactions", "verdict", "rollback", *chosen).out.split()[:1]) == set(later)
    rolled_back = ("transactions", "list", "--group", group, "--state", "rolled_back", "--json")
    assert {one["transaction_id"] for one in run(*rolled_back).json["items"]} >= ids
    nothing = run("transactions", "reissue", "--reason", "it was paid")
    assert (nothing.code, "--group" in nothing.err) == (2, True)
    born = min(one["born_at"] for one in run(*rolled_back).json["items"] if one["transaction_id"] in ids)
    these = ("transactions", "reissue", "--group", group, "--born-after", born, "--reason", "it was paid")
    preview = run(*these)
    assert "3 would be reissued" in preview.out
    assert ids == set(preview.out.split()[:3])
    assert "3 of 3 were reissued" in run(*these, "--no-dry-run", "--yes").out
    assert run(*these, "--no-dry-run", "--yes", "--json").json["matched"] == 0
    assert "0 would be reissued" in run(*these).out
    assert ids <= {one["transaction_id"] for one in run(*rolled_back, "--reissued").json["items"]}
    assert not ids & {one["transaction_id"] for one in run(*rolled_back, "--no-reissued").json["items"]}


@pytest.mark.parametrize(
    "act", [("check",), ("verdict", "commit", "--reason", "x"), ("reissue", "--reason", "x")], ids=lambda act: act[0]
)
@pytest.mark.parametrize(
    "option",
    [("--dry-run",), ("--group", "shop"), ("--born-after", "2026-11-21T10:30:00Z"), ("--limit", "100")],
    ids=lambda option: option[0],
)
def test_a_preview_or_a_filter_beside_an_id_is_refused(
    run_alone: Run, act: tuple[str, ...], option: tuple[str, ...]
) -> None:
    refused = run_alone("transactions", *act, str(UUID(int=7)), *option)
    assert (refused.code, refused.out) == (2, "")
    assert f"{option[0]} cannot go with a TRANSACTION_ID. Nothing was done." in refused.err


def test_an_id_goes_with_no_dry_run(run: Run, url: str, group: str) -> None:
    transaction_id = post_half(url, group)
    decided = ("transactions", "verdict", "rollback", transaction_id, "--reason", "told by phone", "--force")
    assert run(*decided, "--dry-run").code == 2
    assert run("transactions", "show", transaction_id, "--json").json["state"] == "half"
    assert run(*decided, "--no-dry-run").code == 0
