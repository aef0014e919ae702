"""`halfnote consume`, and subscriptions whose messages consumers claim."""

from pathlib import Path

import httpx

from tests.support.cli_runs import Run, run
from tests.support.processes import serving

__all__ = ["run"]


def publish(url: str, topic: str, count: int) -> list[str]:
    """Publish plain messages; return their ids."""
    put = {"check_urls": ["http://127.0.0.1:9/"]}
    assert httpx.put(f"{url}/producer-groups/consumed", json=put).status_code in (200, 201)
    messages = [{"topic": topic, "key": f"order-{n}", "body": n} for n in range(count)]
    answer = httpx.post(f"{url}/messages", json={"producer_group": "consumed", "messages": messages})
    return [one["message_id"] for one in answer.json()["messages"]]


def test_messages_are_printed_and_acknowledged(run: Run, url: str) -> None:
    assert run("subscriptions", "put", "claimed", "--topic", "claimed.order", "--to", "pull").code == 0
    assert "pull" in run("subscriptions", "list").out
    shown = run("subscriptions", "get", "claimed").out
    assert "pull" in shown
    sent = publish(url, "claimed.order", 5)
    kept = run("consume", "claimed", "--count", "1", "--keep")
    assert (kept.code, sent[0] in kept.out) == (0, True)
    printed = run("consume", "claimed", "--count", "3", "--max", "2")
    assert printed.code == 0
    assert [one for one in sent if one in printed.out] == sent[1:4]
    assert "claimed.order order-1" in printed.out
    [last] = [run("consume", "claimed", "--once", "--json").json]
    assert (last["message_id"], last["body"]) == (sent[4], 4)
    assert run("consume", "claimed", "--once").out == ""
    shown = run("subscriptions", "get", "claimed", "--json").json
    assert shown["destination"] == {"type": "pull"}


def test_a_subscription_that_workers_deliver_is_refused(run: Run) -> None:
    assert run("subscriptions", "put", "sent", "--topic", "sent", "--to", "http://127.0.0.1:9/").code == 0
    refused = run("consume", "sent", "--once")
    assert (refused.code, "pull" in refused.err) == (1, True)


def test_what_is_not_given_is_lowered_to_what_the_service_allows(
    run: Run, url: str, database: str, tmp_path: Path
) -> None:
    assert run("subscriptions", "put", "few", "--topic", "few.order", "--to", "pull").code == 0
    sent = publish(url, "few.order", 8)
    with serving(tmp_path, database, HALFNOTE_CLAIM_MAX="3", HALFNOTE_CLAIM_HELD_MAX_S="20") as limited:
        refused = run("consume", "few", "--max", "4", "--once", "--url", limited)
        assert (refused.code, "HALFNOTE_CLAIM_MAX" in refused.err) == (1, True)
        printed = run("consume", "few", "--count", "5", "--url", limited)
        assert (printed.code, [one for one in sent if one in printed.out]) == (0, sent[:5])
        printed = run("consume", "few", "--once", "--url", limited)
        assert (printed.code, [one for one in sent if one in printed.out]) == (0, sent[5:])
