"""Counts by producer group, topic and key, within their limit; the time from commits to receivers' answers."""

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime

import asyncpg
import httpx
import pytest
from prometheus_client import CollectorRegistry

from app.admission.load_limits import LoadLimits
from app.checkback.loop import CheckBack
from app.config import Settings
from app.coordinator import commit_lanes
from app.database.connection import Connection
from app.lifecycle.startup import show_traffic_from_zero
from app.loops import gauges
from app.observability.label_limits import OTHER, LimitedLabel
from app.observability.metric_families import DELIVERY_SECONDS, Families
from app.observability.metrics import Metrics
from app.permissions import Role
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, register_group
from tests.support.api_keys import bearer, make
from tests.support.check_responder import Responder
from tests.support.check_stepping import UNKNOWN, in_doubt, turn
from tests.support.days import post_end, post_half, post_transaction
from tests.support.relay_stepping import order, publish, subscribe, turn_until


def shown(runtime: Runtime, family: str) -> dict[str, float]:
    """Return the series of a family that are not 0, by their labels."""
    lines = [line.rpartition(" ") for line in runtime.metrics.exposition().decode().splitlines()]
    prefix = f"halfnote_{family}"
    series = {
        name.removeprefix(prefix).strip("{}"): float(value)
        for name, _, value in lines
        if name[0] != "#" and name.removeprefix(prefix)[:1] == "{"
    }
    return {labels: value for labels, value in series.items() if value}


async def test_halves_verdicts_and_messages_are_counted(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection
) -> None:
    await register_group(db, "bank")
    await post_transaction(client, order(1), order(2), {"topic": "billing", "body": 1})
    ended = await post_transaction(client, order(3), verdict="rollback")
    assert (await post_end(client, ended, "rollback")).json()["replayed"]
    assert (await post_end(client, ended, "commit")).status_code == 409
    await post_half(client, order(4), group="bank")
    await publish(client, order(5))
    assert shown(runtime, "group_halves_total") == {'producer_group="shop"': 3, 'producer_group="bank"': 1}
    assert shown(runtime, "group_verdicts_total") == {
        'producer_group="shop",verdict="commit"': 2,
        'producer_group="shop",verdict="rollback"': 1,
    }
    assert shown(runtime, "topic_messages_total") == {'topic="order"': 3, 'topic="billing"': 1}


async def test_a_reissue_is_counted(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    rolled_back = await post_transaction(client, order(1), {"topic": "billing", "body": 1}, verdict="rollback")
    answer = await client.post(f"/transactions/{rolled_back}/reissue", json={"reason": "paid after all"})
    assert answer.status_code == 201, answer.text
    assert shown(runtime, "group_halves_total") == {'producer_group="shop"': 2}
    assert shown(runtime, "group_verdicts_total") == {
        'producer_group="shop",verdict="commit"': 1,
        'producer_group="shop",verdict="rollback"': 1,
    }
    assert shown(runtime, "topic_messages_total") == {'topic="order"': 1, 'topic="billing"': 1}


async def test_a_rollback_by_policy_is_counted(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> None:
    async with Responder(content=UNKNOWN) as shop:
        await register_group(db, "shop", check_urls=[shop.url], max_checks=1, on_exhausted="rollback")
        await in_doubt(client, runtime)
        await turn(runtime, CheckBack())
    assert shown(runtime, "group_verdicts_total") == {'producer_group="shop",verdict="rollback"': 1}


async def test_a_plain_message_that_is_not_committed_is_not_counted(
    client: httpx.AsyncClient, runtime: Runtime, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise asyncpg.DeadlockDetectedError("a test")

    with monkeypatch.context() as failing:
        failing.setattr(commit_lanes, "record_ends", fail)
        answer = await client.post("/messages", json={"producer_group": "shop", "messages": [order(1)]})
        assert answer.status_code == 503, answer.text
    assert shown(runtime, "group_halves_total") == {}
    await publish(client, order(1))
    assert shown(runtime, "group_halves_total") == {'producer_group="shop"': 1}


async def test_invented_names_make_no_series(settings: Settings, dsn: str, db: Connection, group: str) -> None:
    few = settings.model_copy(update={"metrics_values_max": 2})
    for topic, seen_at in (("old", "2020-01-01"), ("newer", "2021-01-01"), ("newest", "2022-01-01")):
        at = datetime.fromisoformat(seen_at).replace(tzinfo=UTC)
        await db.execute("insert into topic (name, first_seen_at) values ($1, $2)", topic, at)
    # The second process begins with other topics, and shows the same series as the first.
    for _ in range(2):
        async with assembled(few, dsn) as runtime, client_of(runtime) as client:
            await publish(client, *({"topic": f"invented-{number}", "body": number} for number in range(20)))
            await publish(client, {"topic": "newest", "body": 1}, {"topic": "old", "body": 1})
            assert shown(runtime, "topic_messages_total") == {'topic="old"': 1, f'topic="{OTHER}"': 21}
            assert 'halfnote_topic_messages_total{topic="newer"} 0.0' in runtime.metrics.exposition().decode()


async def test_further_subscriptions_share_their_counters_and_histograms(
    settings: Settings, dsn: str, db: Connection, group: str
) -> None:
    few = settings.model_copy(update={"metrics_values_max": 2})
    by_name = {'subscription="first"', 'subscription="second"', f'subscription="{OTHER}"'}
    async with assembled(few, dsn) as runtime, client_of(runtime) as client, Responder() as receiver:
        relay = Relay(runtime)
        for name in ("first", "second", "third", "fourth"):
            await subscribe(client, receiver, name)
        # As in a process that starts now.
        await show_traffic_from_zero(runtime)
        await gauges.step(runtime, runtime.clock.now())
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 4 from receipt"))
        await relay.drain(runtime)
        assert sum(shown(runtime, "deliveries_total").values()) == 4
        for family in ("deliveries", "delivery_seconds", "commit_to_received_seconds", "breakers", "expired_messages"):
            assert subscriptions_of(runtime, family) == by_name
        assert subscriptions_of(runtime, "left_undelivered") == by_name
        # Gauges tell of every one.
        assert len(subscriptions_of(runtime, "breaker_open")) == 4


def subscriptions_of(runtime: Runtime, family: str) -> set[str]:
    """Return the labels of the subscriptions that a family has series of."""
    pattern = rf"^halfnote_{family}[a-z_]*{{.*?(subscription=\"[^\"]*\")"
    return set(re.findall(pattern, runtime.metrics.exposition().decode(), re.MULTILINE))


def test_values_beyond_the_limit_are_not_stored() -> None:
    label = LimitedLabel[str, str](2, str.upper, lambda: OTHER)
    assert [label.of(value) for value in ("a", "b", "c", "a", "d")] == ["A", "B", OTHER, "A", OTHER]
    assert set(label._series) == {"a", "b"}


async def test_a_flush_is_published_without_an_exposition(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    await publish(client, order(1))
    tallies = runtime.metrics.tallies
    assert tallies._timer is not None
    # Where several processes answer together, the one that answers cannot publish for the others.
    await runtime.lanes.close()
    assert tallies._timer is None
    assert runtime.metrics.registry.get_sample_value("halfnote_topic_messages_total", {"topic": "order"}) == 1


async def test_requests_and_their_times_are_published_a_moment_later() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    for seconds in (0.001, 0.004, 20.0):
        metrics.http.observe_request("/half", 201, seconds)
    metrics.http.observe_request("/half", 503, 0.004)
    of_half = {"route": "/half"}
    assert value("halfnote_request_seconds_count", of_half) == 0
    async with asyncio.timeout(10):
        while not value("halfnote_requests_total", of_half | {"status": "503"}):
            await asyncio.sleep(0.01)
    assert value("halfnote_requests_total", of_half | {"status": "201"}) == 3
    buckets = [
        value("halfnote_request_seconds_bucket", of_half | {"le": le}) for le in ("0.001", "0.005", "10.0", "+Inf")
    ]
    assert buckets == [1, 3, 3, 4]
    assert value("halfnote_request_seconds_sum", of_half) == pytest.approx(20.009)
    # Nothing is counted twice.
    metrics.tallies.publish()
    assert value("halfnote_request_seconds_count", of_half) == 4


async def test_refusals_are_counted_by_key_and_limit(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    runtime.settings = runtime.settings.model_copy(update={"key_rate_per_s": 0.001, "auth": "keys"})
    runtime.load_limits = LoadLimits(runtime.settings, runtime.metrics.traffic.refused)
    runtime.authenticator.off = False
    key = await make(runtime, Role.PRODUCER, name="shop", producer_groups=["shop"], topics=["*"])
    half = {"producer_group": "shop", "messages": [order(1)]}
    answers = [await client.post("/half", json=half, headers=bearer(key)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 429, 429]
    [(labels, count)] = shown(runtime, "key_refusals_total").items()
    assert labels.startswith('key="shop",key_id="')
    assert labels.endswith('",limit="rate"')
    assert key not in labels
    assert count == 2


@pytest.mark.parametrize("values", [[], [0.0], [0.005, 0.0051, 7, 86_400, 90_000, 7]])
def test_a_batch_is_observed_like_its_values(values: list[float]) -> None:
    registry = CollectorRegistry()
    families = Families(registry)
    batch = families.batch_histogram("batch", "", DELIVERY_SECONDS)
    single = families.histogram("single", "", DELIVERY_SECONDS)
    batch.observe_all(values)
    for value in values:
        single.observe(value)
    one, other = [
        {(sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value for sample in family.samples}
        for family in registry.collect()
    ]
    assert one == pytest.approx(other)


def received(runtime: Runtime, subscription: str, at_most_s: float | None = None) -> float:
    """Return how many messages a subscription received, within some time if it is given."""
    name, labels = "halfnote_commit_to_received_seconds_count", {"subscription": subscription}
    if at_most_s is not None:
        name, labels = name.replace("_count", "_bucket"), {**labels, "le": str(at_most_s)}
    return runtime.metrics.registry.get_sample_value(name, labels) or 0


async def test_the_time_from_commit_to_answer_is_measured(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    relay = Relay(runtime)

    def until_received(count: int) -> Callable[[], bool]:
        return lambda: received(runtime, "mailer") == count

    async with Responder() as receiver:
        await subscribe(client, receiver, retry=[60])
        await publish(client, order(1))
        await turn_until(relay, runtime, until_received(1))
        assert received(runtime, "mailer", 30.0) == 1
        # Committed, and then nothing is delivered for 40 seconds.
        await publish(client, order(2))
        runtime.clock.offset_s += 40
        await turn_until(relay, runtime, until_received(2))
        assert (received(runtime, "mailer", 30.0), received(runtime, "mailer", 60.0)) == (1, 2)
        # A delayed message counts from its due time. The clock of the database does not move, so it is due in 100 s.
        await publish(client, order(3, deliver_after_s=140))
        runtime.clock.offset_s += 102
        await turn_until(relay, runtime, until_received(3))
        assert (received(runtime, "mailer", 30.0), received(runtime, "mailer", 60.0)) == (2, 3)
    await relay.drain(runtime)


async def test_a_retried_message_counts_once_and_a_replay_not_at_all(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    relay = Relay(runtime)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[60])
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        receiver.status = 200
        runtime.clock.offset_s += 100
        await turn_until(relay, runtime, lambda: received(runtime, "mailer") == 1)
        assert (received(runtime, "mailer", 60.0), received(runtime, "mailer", 300.0)) == (0, 1)
        answer = await client.post("/subscriptions/mailer/replay", json={"from": "earliest"})
        assert answer.status_code == 202, answer.text
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt where replay > 0"))
        assert len(receiver.calls) == 3
        assert received(runtime, "mailer") == 1
    await relay.drain(runtime)


async def test_a_subscription_cannot_have_the_name_of_all_further_ones(client: httpx.AsyncClient) -> None:
    content = {"topics": ["order"], "destination": {"type": "webhook", "url": "https://mailer.example/in"}}
    answer = await client.put(f"/subscriptions/{OTHER}", json=content)
    assert answer.status_code == 422
    assert "a name has" in answer.text
