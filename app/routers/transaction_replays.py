"""`POST /transactions/{id}/replay`: sends the messages of one transaction to one subscription again."""

from collections.abc import Sequence
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from app.database.connection import Connection
from app.errors import (
    DayGone,
    Invalid,
    LogGone,
    NotCommitted,
    ReplayRunning,
    SubscriptionUnknown,
    TooManyReplays,
    TransactionUnknown,
)
from app.operations.audit import acting_person, audit_entry
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import unknown_transaction
from app.routers.replays import begin, replay_answer
from app.routers.subscription_lookup import known
from app.routers.transactions import TransactionId
from app.schemas.fields import Actor, Name, Position, Reason, Strict
from app.schemas.replays import ReplayAnswer
from app.store.admin.audit import record
from app.store.coordinator.deliveries import LAST_POSITION
from app.store.coordinator.delivery_facts import DeliveryFacts, read_facts
from app.store.coordinator.transactions import transaction_state
from app.store.retention.days import day_of
from app.store.subscriptions import replays as store
from app.store.subscriptions.new_readers import share_new_readers
from app.store.subscriptions.replays import NewReplay
from app.verdicts import DayState

router = APIRouter(prefix="/transactions", tags=["transactions"])


class TransactionReplay(Strict):
    """What to send again, and to which subscription."""

    subscription: Name = Field(description="only this subscription gets it", examples=["mailer"])
    position: Position | None = Field(
        None, description="only the message at this position; not given: each that the subscription takes"
    )
    reason: Reason
    actor: Actor = None


@router.post(
    "/{transaction_id:uuid}/replay",
    status_code=202,
    summary="Send the messages of a transaction to one subscription again",
    responses=problems(
        TransactionUnknown,
        NotCommitted,
        DayGone,
        SubscriptionUnknown,
        Invalid,
        LogGone,
        ReplayRunning,
        TooManyReplays,
    ),
)
async def replay_transaction(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, wanted: TransactionReplay
) -> ReplayAnswer:
    """Replay the messages of a committed transaction that the subscription takes, beside its live delivery.

    Messages keep their ids, and `halfnote-replay` names the replay. A message that was never delivered, because the
    subscription is newer or was changed, is sent as well. One that is still waiting is delivered twice. A paused
    subscription gets it when it is resumed. A repeated request is refused as by `POST
    /subscriptions/{name}/replay`.
    """
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        await share_new_readers(connection)
        subscription = await known(connection, wanted.subscription, lock=True)
        standing = await transaction_state(connection, transaction_id)
        positions = (0, LAST_POSITION) if wanted.position is None else (wanted.position, wanted.position)
        facts = await read_facts(connection, transaction_id, positions, subscription.name, 1, now)
        offsets = _offsets(facts, wanted) if standing is not None else []
        made = None
        if offsets:
            await _must_be_in_log(connection, transaction_id, offsets[0])
            actor = acting_person(caller, wanted.actor)
            part = (offsets[0] - 1, offsets[-1])
            asked = NewReplay(subscription.subscription_id, *part, None, actor, wanted.reason)
            made = await begin(connection, subscription.name, asked, now)
            said = audit_entry(
                caller,
                "transaction.replay",
                transaction_id,
                actor=wanted.actor,
                reason=wanted.reason,
                subscription=subscription.name,
                replay_id=made.replay_id,
            )
            await record(connection, said, now)
    if made is None:
        raise await unknown_transaction(runtime, transaction_id)
    return replay_answer(subscription.name, made)


def _offsets(facts: Sequence[DeliveryFacts], wanted: TransactionReplay) -> list[int]:
    """Return the offsets of the messages that the subscription takes, in order. Raises NotCommitted or Invalid."""
    if not facts:
        raise Invalid("`position`: the transaction has no message at this position.", field="position")
    if any(one.offset is None for one in facts):
        raise NotCommitted("Only messages of a committed transaction can be sent. Decide it first, or reissue it.")
    taken = [one.offset for one in facts if one.takes_topic and one.takes_tag and one.takes_headers]
    offsets = sorted(offset for offset in taken if offset is not None)
    if not offsets:
        raise Invalid(
            f"`subscription`: `{wanted.subscription}` takes none of these messages, by its topics and filters. "
            "`GET /transactions/{id}/delivery` says why.",
            field="subscription",
        )
    return offsets


async def _must_be_in_log(connection: Connection, transaction_id: UUID, first: int) -> None:
    """Raise LogGone if upkeep may remove the message at any time. No day is closed until the database transaction ends.

    Offsets do not show it: an older day may be open for longer.
    """
    day, oldest = await day_of(connection, transaction_id), await store.oldest(connection)
    if oldest is None or first < oldest or day is None or day.state is not DayState.OPEN:
        raise LogGone(f"Offset {first} was removed from the database. The oldest is {oldest}.", oldest=oldest)
