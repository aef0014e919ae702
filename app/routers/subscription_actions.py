"""Actions on a subscription: test, pause, resume, rotate the secret."""

from datetime import datetime
from typing import Annotated

import structlog
from fastapi import APIRouter, Query, Response

from app.announcements import breaker_closed
from app.delivery import Delivered, Delivery
from app.destinations.registry import NotInstalled, destination_of
from app.errors import ClientNotInstalled, NothingSent, NotSigned, SecretsUnreadable, SubscriptionUnknown
from app.ids import uuid7
from app.operations.audit import audit_entry
from app.permissions import Caller
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.secret_rotation import SecretState, refuse_if_changed, version_of
from app.routers.subscription_lookup import answers, known
from app.runtime.state import Runtime
from app.schemas.fields import ActNote, NamePath
from app.schemas.producer_groups import NewSecret
from app.schemas.subscriptions import SubscriptionAnswer, TestAnswer
from app.secrets.signatures import dump, new_secret, overlap_end, rotated
from app.secrets.vault import SUBSCRIPTION_SECRETS
from app.secrets.writer import Seal
from app.store.admin.audit import record
from app.store.relay.announcements import announce
from app.store.relay.checkpoints import close_breakers
from app.store.subscriptions import subscriptions as store
from app.store.subscriptions.subscriptions import Subscription
from app.verdicts import SubscriptionState

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])
log = structlog.get_logger(__name__)

# The audit action that leads to each state.
WORDS = {SubscriptionState.PAUSED: "pause", SubscriptionState.ACTIVE: "resume"}
TEST_TOPIC = "halfnote.test"


@router.post(
    "/{name}/test",
    summary="Send a test message to the destination",
    responses=problems(SubscriptionUnknown, NothingSent, ClientNotInstalled, SecretsUnreadable),
)
async def post_test(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, note: Annotated[ActNote, Query()]
) -> TestAnswer:
    """Send a message of the topic `halfnote.test` now, in any state, and return the result.

    In the name of a queue, a subject, a topic or a stream of a broker, `{topic}` stands for the first of the
    subscription's topics that is no pattern, and `{tag}` for the first tag of its filters. If there is none, `{topic}`
    is `halfnote.test` and `{tag}` empty; `{key}` is empty and `{group}` is `halfnote` in any case.

    Only an audit row is written. The answer of the destination has no effect on the subscription.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        subscription = await known(connection, name)
        if subscription.is_pulled:
            raise NothingSent(f"Consumers claim the messages of `{name}`: nothing is sent.")
        await record(connection, audit_entry(caller, "subscription.test", name, **dict(note)), now)
        # Inside the database transaction, so that a message that cannot be sent leaves no audit row.
        try:
            destination = destination_of(
                subscription, runtime.deliveries_http, runtime.network_policy, runtime.vault, runtime.settings.origin
            )
        except NotInstalled as missing:
            raise ClientNotInstalled(f"{missing}.", command=missing.command) from None
    try:
        [outcome] = await destination.deliver([_test_of(subscription, now)], now)
    finally:
        await destination.close()
    failed = None if isinstance(outcome, Delivered) else outcome
    return TestAnswer(
        outcome=type(outcome).__name__.lower(),
        status=outcome.status,
        duration_ms=outcome.duration_ms,
        error=failed.error if failed else None,
        response=failed.response if failed else None,
    )


@router.post("/{name}/pause", summary="Pause a subscription", responses=problems(SubscriptionUnknown))
async def post_pause(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, note: Annotated[ActNote, Query()]
) -> SubscriptionAnswer:
    """Stop delivery until the subscription is resumed. Deliveries in flight finish. The checkpoint stays."""
    return await _set_state(runtime, caller, name, SubscriptionState.PAUSED, note)


@router.post("/{name}/resume", summary="Resume a subscription", responses=problems(SubscriptionUnknown))
async def post_resume(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, note: Annotated[ActNote, Query()]
) -> SubscriptionAnswer:
    """Continue from the checkpoint, after a pause or after the destination answered 410."""
    return await _set_state(runtime, caller, name, SubscriptionState.ACTIVE, note)


@router.post(
    "/{name}/reset-breaker",
    summary="Close a subscription's circuit breaker",
    responses=problems(SubscriptionUnknown),
)
async def post_reset_breaker(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, note: Annotated[ActNote, Query()]
) -> SubscriptionAnswer:
    """Send at full speed again, for a destination that is repaired. Without an open breaker nothing changes.

    It also ends the pause that a destination asked for by 429 or 503 with `Retry-After`.

    The worker opens the subscription again, within seconds, after the deliveries in flight. If the destination still
    fails, the breaker opens again. Until then five different messages, or three without a connection, use up an
    attempt.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        subscription = await known(connection, name)
        # Checkpoints are locked before subscriptions, as by a settle.
        opened = await close_breakers(connection, subscription.subscription_id)
        since = min(filter(None, opened), default=None)
        if opened:
            await store.touch(connection, subscription.subscription_id, now)
            await record(connection, audit_entry(caller, "subscription.reset_breaker", name, **dict(note)), now)
        [answer] = await answers(runtime, connection, [await known(connection, name)])
        told = None if since is None else breaker_closed(name, subscription.topics, opened_at=since, at=now)
        if told is not None:
            # Last: it locks the offsets, for which the commits of all producers wait.
            await announce(connection, [told], now)
    if opened:
        log.warning("breaker_reset", subscription=name, open_since=since and since.isoformat())
        runtime.wake_ups.published()
    return answer


@router.post(
    "/{name}/rotate-secret",
    summary="Give a subscription a new secret",
    responses=problems(SubscriptionUnknown, NotSigned, SecretsUnreadable),
)
async def post_rotate_secret(
    name: NamePath, runtime: RuntimeDep, caller: CallerDep, response: Response, note: Annotated[ActNote, Query()]
) -> NewSecret:
    """Create a new secret, shown only in this answer.

    For 24 hours the old secret signs as well, so that receivers can be changed. This also holds for an old secret that
    another person was shown a moment ago: `earlier_signs_until` is set then. The scope of a subscriber's key must
    include every topic of the subscription, because the secret signs messages of all of them.
    """
    response.headers["cache-control"] = "no-store"
    return await rotate_seen_secret(name, runtime, caller, note)


async def rotate_seen_secret(
    name: str, runtime: Runtime, caller: Caller, note: ActNote, *, seen: str | None = None
) -> NewSecret:
    """Create a new secret. `seen`: the version of the secrets that the caller saw; None: any.

    Raises SubscriptionUnknown, NotSigned, SecretsUnreadable, and Invalid if the secrets are not those that were seen.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        subscription = await known(connection, name, lock=True)
        caller.must_cover_topics(subscription.topics)
        destination = subscription.destination
        if destination["type"] != "webhook":
            raise NotSigned(
                f"`{name}` sends to {destination['type']} and has no signing secret. Change its credentials by a PUT."
            )
        refuse_if_changed(subscription.secrets, seen)
        secret = new_secret(destination["signing"])
        former = runtime.vault.secrets(SUBSCRIPTION_SECRETS, name, subscription.secrets)
        secrets = rotated(former, secret, now)
        seal = Seal(runtime.vault, name)
        await store.set_secrets(connection, name, seal(SUBSCRIPTION_SECRETS, dump(secrets)), now)
        await record(connection, audit_entry(caller, "subscription.rotate_secret", name, **dict(note)), now)
    return NewSecret(
        secret=secret, former_signs_until=overlap_end(secrets, now), earlier_signs_until=overlap_end(former, now)
    )


async def secret_state(name: str, runtime: Runtime, caller: Caller) -> SecretState:
    """Return the version of the secrets, and until when a former one signs. Raises SubscriptionUnknown."""
    caller.must_have_subscription(name)
    async with runtime.request_pool.connection() as connection:
        subscription = await known(connection, name)
    version = version_of(subscription.secrets)
    try:
        secrets = runtime.vault.secrets(SUBSCRIPTION_SECRETS, name, subscription.secrets)
    except SecretsUnreadable:
        return SecretState(version, None)
    return SecretState(version, overlap_end(secrets, runtime.clock.now()))


async def _set_state(
    runtime: Runtime, caller: Caller, name: str, state: SubscriptionState, note: ActNote
) -> SubscriptionAnswer:
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        changed = await store.set_state(connection, name, state, now)
        if changed is not None:
            await record(connection, audit_entry(caller, f"subscription.{WORDS[state]}", name, **dict(note)), now)
        [answer] = await answers(runtime, connection, [changed or await known(connection, name)])
        return answer


def _test_of(subscription: Subscription, now: datetime) -> Delivery:
    transaction_id = uuid7(now)
    return Delivery(
        subscription=subscription.name,
        message_id=f"tst_{transaction_id}",
        transaction_id=transaction_id,
        offset=0,
        producer_group="halfnote",
        topic=TEST_TOPIC,
        key=None,
        tag=None,
        headers={},
        content_type="application/json",
        body=b'{"type":"halfnote.test"}',
        committed_at=now,
        attempt=1,
        placeholders=_placeholders(subscription),
    )


def _placeholders(subscription: Subscription) -> dict[str, str]:
    """Return what names a queue, a subject or a stream of real messages, as far as the subscription names it exactly.

    No queue takes the test's own topic, so without these the test would fail although deliveries succeed.
    """
    topics = (topic for topic in subscription.topics if not topic.endswith("*"))
    exact = {"topic": next(topics, None), "tag": next(iter((subscription.filters or {}).get("tags") or ()), None)}
    return {name: value for name, value in exact.items() if value is not None}
