"""What is done to a subscription besides changing it: test, pause, resume, a new secret."""

from datetime import datetime

from fastapi import APIRouter, Response

from app.access import Caller
from app.acts import act
from app.destinations.base import Delivered, Delivery
from app.destinations.kinds import NotInstalled, destination_of
from app.errors import ClientNotInstalled, NotSigned, SecretsUnreadable, SubscriptionUnknown
from app.group_shapes import NewSecret
from app.ids import uuid7
from app.routers.sealing import sealing
from app.routers.shared import CallerDep, NamePath, RuntimeDep, problems
from app.routers.subscribed import answers, known
from app.runtime import Runtime
from app.sealing import SUBSCRIPTION_SECRETS
from app.signing import dump, new_secret, rotated
from app.store import subscriptions as store
from app.store.audit import record
from app.store.subscriptions import Subscription
from app.subscription_answers import SubscriptionAnswer, TestAnswer

router = APIRouter(prefix="/subscriptions", tags=["subscriptions"])

# What a person does to bring about a state.
WORDS = {"paused": "pause", "active": "resume"}
TEST_TOPIC = "halfnote.test"


@router.post(
    "/{name}/test",
    summary="Send a test message to the destination",
    responses=problems(SubscriptionUnknown, ClientNotInstalled, SecretsUnreadable),
)
async def post_test(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> TestAnswer:
    """Send a message of the topic `halfnote.test` now, whatever the state, and tell what came back.

    Nothing is recorded but who asked for it, and nothing follows from the answer.
    """
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        subscription = await known(connection, name)
        await record(connection, act(caller, "subscription.test", name), now)
        # Within it, so that what cannot be sent at all leaves no record.
        try:
            destination = destination_of(
                subscription, runtime.deliveries_http, runtime.dialling, runtime.vault, runtime.settings.origin
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
async def post_pause(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> SubscriptionAnswer:
    """Deliver nothing until it is resumed. What is in flight is finished; the checkpoint stays, nothing is lost."""
    return await _set_state(runtime, caller, name, "paused")


@router.post("/{name}/resume", summary="Resume a subscription", responses=problems(SubscriptionUnknown))
async def post_resume(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> SubscriptionAnswer:
    """Go on from the checkpoint, after a pause or after the destination answered 410."""
    return await _set_state(runtime, caller, name, "active")


@router.post(
    "/{name}/rotate-secret",
    summary="Give a subscription a new secret",
    responses=problems(SubscriptionUnknown, NotSigned, SecretsUnreadable),
)
async def post_rotate_secret(name: NamePath, runtime: RuntimeDep, caller: CallerDep, response: Response) -> NewSecret:
    """Make a new secret, shown this once. For 24 hours the old one signs along, so that receivers can be changed."""
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        subscription = await known(connection, name, lock=True)
        destination = subscription.destination
        if destination["type"] != "webhook":
            raise NotSigned(f"`{name}` goes to {destination['type']}: its password or token is changed by a PUT.")
        secret = new_secret(destination["signing"])
        former = runtime.vault.secrets(SUBSCRIPTION_SECRETS, name, subscription.secrets)
        secrets = rotated(former, secret, now)
        seal = await sealing(runtime, connection, name)
        await store.set_secrets(connection, name, seal(SUBSCRIPTION_SECRETS, dump(secrets)), now)
        await record(connection, act(caller, "subscription.rotate_secret", name), now)
    response.headers["cache-control"] = "no-store"
    until = max((former.expires_at for former in secrets if former.expires_at is not None), default=None)
    return NewSecret(secret=secret, former_signs_until=until)


async def _set_state(runtime: Runtime, caller: Caller, name: str, state: str) -> SubscriptionAnswer:
    caller.must_have_subscription(name)
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        changed = await store.set_state(connection, name, state, now)
        if changed is not None:
            await record(connection, act(caller, f"subscription.{WORDS[state]}", name), now)
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
    )
