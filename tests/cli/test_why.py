"""`halfnote why`: by a transaction's id, a message's id, and a key."""

from uuid import uuid4

import asyncpg

from tests.support.cli_requests import group, post_end, post_half
from tests.support.cli_runs import Run, run

__all__ = ["group", "run"]


def test_a_message_is_explained_by_each_of_its_names(run: Run, url: str, group: str) -> None:
    # A topic of its own: other tests subscribe to `order`.
    earlier, newest = (post_half(url, group, "explained") for _ in range(2))
    post_end(url, group, newest, "commit")
    for name in (newest, f"{newest}-0"):
        shown = run("why", name)
        assert shown.code == 0
        assert f"{newest}-0" in shown.out
        assert "No subscription takes it" in " ".join(shown.out.split())
    by_key = run("why", "order-1030", "--json").json
    assert by_key["messages"][0]["key"] == "order-1030"
    shown = run("why", earlier)
    assert "Not sent yet: the producer group" in " ".join(shown.out.split())
    assert run("why", f"{newest}-0", "--json").json["messages"][0]["reason"] == "no_subscription"


async def test_many_deliveries_are_explained_whole(run: Run, url: str, group: str, database: str) -> None:
    topic = f"explained-{uuid4().hex[:8]}"
    connection = await asyncpg.connect(database)
    await connection.execute(
        "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state, "
        "created_at, updated_at, started_after, matches_since) "
        "select $1 || '-' || lpad(n::text, 4, '0'), array[$1], '{}', '[]', '{}', 1, 1, '{}', 'paused', now(), now(), "
        "0, now() from generate_series(0, 1499) n",
        topic,
    )
    try:
        transaction_id = post_half(url, group, topic)
        post_end(url, group, transaction_id, "commit")
        shown = run("why", transaction_id, "--json").json
        assert shown["deliveries_cursor"] is None
        [message] = shown["messages"]
        # Other tests subscribe to all topics.
        explained = [one["subscription"] for one in message["subscriptions"]]
        assert [one for one in explained if one.startswith(topic)] == [f"{topic}-{n:04}" for n in range(1500)]
        assert len(set(explained)) == len(explained)
    finally:
        await connection.execute("delete from subscription where topics = array[$1::text]", topic)
        await connection.close()


def test_what_is_not_known_is_said(run: Run, url: str) -> None:
    unknown = run("why", "no-such-key-4711")
    assert unknown.code == 1
    assert "no recent transaction has a message of this key" in unknown.err
    assert run("why", "0193a7d6-a5c8-7b1e-8f00-1030a1030a10").code == 1
