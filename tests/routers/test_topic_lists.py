"""`GET /topics`: the subscriptions of each topic, by the one rule of topic patterns."""

import httpx
import pytest

from app.database.connection import Connection
from app.topic_patterns import TopicPatterns

TOPICS = ("half", "halfnote.parked", "halfnote.test", "order", "order.created", "order.paid", "orders", "photo")
PATTERNS = {
    "all": ["*"],
    "all-halfnote": ["halfnote.*"],
    "both": ["order", "order*", "photo"],
    "halves": ["half*"],
    "of-order": ["order.*"],
    "one": ["order"],
    "parked": ["halfnote.parked", "order.paid"],
}


async def test_a_topic_has_the_subscriptions_that_take_it(client: httpx.AsyncClient, db: Connection) -> None:
    await db.execute("insert into topic (name, first_seen_at) select t, now() from unnest($1::text[]) t", list(TOPICS))
    for name, patterns in PATTERNS.items():
        await db.execute(
            "insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, "
            "state, created_at, updated_at, started_after, matches_since) "
            "values ($1, $2, '{}', '[]', '{}', 1, 1, '{}', 'active', now(), now(), 0, now())",
            name,
            patterns,
        )
    found: dict[str, list[str]] = {}
    cursor: str | None = None
    while True:
        page = (await client.get("/topics", params={"limit": 3, **({"cursor": cursor} if cursor else {})})).json()
        found |= {one["topic"]: one["subscriptions"] for one in page["items"]}
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == {
        topic: [name for name, patterns in PATTERNS.items() if TopicPatterns(patterns).match(topic)] for topic in TOPICS
    }
    assert found["halfnote.test"] == ["all-halfnote"]
    assert found["order"] == ["all", "both", "one"]


@pytest.mark.parametrize("path", ["/topics", "/subscriptions", "/transactions", "/dead-letters", "/audit", "/api-keys"])
async def test_a_limit_is_written_in_digits(client: httpx.AsyncClient, path: str) -> None:
    for text in ("10", "10.0"):
        assert (await client.get(path, params={"limit": text})).status_code == 200
    for text in ("1_0", "+10", " 10", "10\n", "\u0661\u0660"):
        refused = await client.get(path, params={"limit": text})
        assert (refused.status_code, refused.json()["field"]) == (422, "limit")
