"""Reissues: the messages of rolled-back transactions are sent as new committed ones; one by one or by a filter."""

from collections.abc import Sequence
from uuid import UUID

from fastapi import APIRouter

from app.database.connection import Connection
from app.database.standby_wait import uncanceled_waits
from app.errors import DayGone, Draining, GroupUnregistered, Invalid, NotRolledBack, TransactionUnknown
from app.ids import message_id, uuid7
from app.operations.audit import acting_person, audit_entry
from app.permissions import Caller
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import unknown_transaction
from app.routers.transaction_selection import Many, matched, matching
from app.routers.transactions import TransactionId
from app.runtime.state import Runtime
from app.schemas.fields import Actor, Reason, Strict
from app.schemas.transactions import Matched, PublishedShown, ReissueAnswer
from app.store.admin.audit import record
from app.store.coordinator.halves import Half, HalfMessage, HalfRow, half_rows, insert_halves
from app.store.coordinator.ops import End, Recorded, record_ends
from app.store.coordinator.reissues import Reissue, add_reissue, reissued_as
from app.store.coordinator.transactions import transaction_state
from app.verdicts import Source, State, Verdict

router = APIRouter(prefix="/transactions", tags=["transactions"])


class _ReissuedBefore(Exception):
    """The transaction was already reissued."""


class ReissueRequest(Strict):
    """A person's decision to send the messages of a rolled-back transaction."""

    reason: Reason
    actor: Actor = None


class ReissueMany(Many):
    """Selects the rolled-back transactions to reissue. Those that were reissued before are left out."""

    reason: Reason
    actor: Actor = None


@router.post(
    "/{transaction_id:uuid}/reissue",
    status_code=201,
    summary="Send the messages of a rolled-back transaction",
    responses=problems(TransactionUnknown, NotRolledBack, DayGone, GroupUnregistered, Draining),
)
async def reissue_transaction(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, wanted: ReissueRequest
) -> ReissueAnswer:
    """Store and commit the same messages as a new transaction. The old verdict stands. Each names the other.

    A transaction is reissued at most once: a second call is refused with `reissued_as`. Delays (`deliver_after_s`)
    count from the new commit.
    """
    return await _reissued(runtime, caller, transaction_id, wanted.reason, wanted.actor)


@router.post(
    "/reissue",
    summary="Send the messages of many rolled-back transactions",
    responses=problems(Invalid, GroupUnregistered, Draining),
)
async def reissue_transactions(runtime: RuntimeDep, caller: CallerDep, wanted: ReissueMany) -> Matched:
    """Reissue every rolled-back transaction that matches a filter and was not reissued, in the order of their ids.

    `dry_run` defaults to true: the first call shows which transactions it would reissue. To reissue no others, send its
    `transaction_ids`. Each is a commit of its own.
    Transactions that another call reissues meanwhile do not change. After an error some may have been reissued:
    repeating the call reissues the rest.
    """
    rows, more = await matching(runtime, wanted, State.ROLLED_BACK, reissued=False)
    changed = 0
    if not wanted.dry_run:
        # The offsets then follow the order in which the transactions were born.
        for transaction_id in sorted(row.transaction_id for row in rows):
            try:
                await _reissued(runtime, caller, transaction_id, wanted.reason, wanted.actor)
            except (NotRolledBack, DayGone):
                continue
            changed += 1
    return matched(rows, wanted, changed, more)


async def _reissued(
    runtime: Runtime, caller: Caller, transaction_id: UUID, reason: str, actor: str | None
) -> ReissueAnswer:
    """Reissue a transaction with its audit row. Raises what the routes name."""
    if runtime.refusing_halves:
        raise Draining(
            "This service drains: it accepts ends, but no new halves. Repeat the request later.", retry_after_s=5
        )
    rows = await _rolled_back(runtime, transaction_id)
    made = Reissue(transaction_id, uuid7(runtime.clock.now()), acting_person(caller, actor), reason)
    said = audit_entry(
        caller,
        "transaction.reissue",
        transaction_id,
        actor=actor,
        reason=reason,
        reissued_as=made.reissued_as,
    )
    try:
        async with runtime.request_pool.transaction() as connection:
            await record(connection, said, runtime.clock.now())
            recorded = await _reissue(connection, runtime, rows, made)
    except _ReissuedBefore:
        # After the audit row was rolled back, so that this commit waits for the earlier one only.
        async with runtime.request_pool.connection() as connection:
            with uncanceled_waits(connection):
                earlier = await reissued_as(connection, transaction_id)
        raise NotRolledBack(f"The transaction was already reissued as {earlier}.", reissued_as=earlier) from None
    runtime.metrics.http.halves.inc()
    runtime.metrics.http.verdicts.labels(Verdict.COMMIT.word, Source.OPERATOR.word).inc()
    traffic = runtime.metrics.traffic
    traffic.count_halves(rows[0].producer_group)
    traffic.count_verdicts(rows[0].producer_group, Verdict.COMMIT)
    for message in recorded.messages:
        traffic.count_messages(message.topic)
    runtime.metrics.tallies.publish_soon()
    runtime.wake_ups.published()
    assert recorded.decided_at is not None
    return ReissueAnswer(
        transaction_id=made.reissued_as,
        reissued_from=transaction_id,
        committed_at=recorded.decided_at,
        messages=[
            PublishedShown(
                message_id=message_id(made.reissued_as, message.position), topic=message.topic, offset=message.offset
            )
            for message in recorded.messages
        ],
    )


async def _rolled_back(runtime: Runtime, transaction_id: UUID) -> list[HalfRow]:
    """Return the messages of a rolled-back transaction. A verdict never changes, so no lock is needed."""
    async with runtime.request_pool.connection() as connection:
        standing = await transaction_state(connection, transaction_id)
        rows = await half_rows(connection, transaction_id)
    if standing is None or not rows:
        raise await unknown_transaction(runtime, transaction_id)
    if standing.state is not State.ROLLED_BACK:
        raise NotRolledBack(
            f"Only a rolled-back transaction can be reissued; this one is {standing.state}.", state=standing.state
        )
    return rows


async def _reissue(connection: Connection, runtime: Runtime, rows: Sequence[HalfRow], made: Reissue) -> Recorded:
    """Write the reissue, the new half and its commit in the caller's database transaction."""
    now = runtime.clock.now()
    if not await add_reissue(connection, made, now):
        raise _ReissuedBefore
    half = _copy(rows, made)
    if await insert_halves(connection, [half], [], now) == [None]:
        raise GroupUnregistered(
            f"Producer group `{half.producer_group}` is no longer registered: PUT /producer-groups/<name> first.",
            field="producer_group",
        )
    end = End(half.transaction_id, None, Verdict.COMMIT, Source.OPERATOR, actor=made.actor, reason=made.reason)
    [recorded] = await record_ends(connection, [end], now)
    return recorded


def _copy(rows: Sequence[HalfRow], made: Reissue) -> Half:
    first = rows[0]
    assert first.digest is not None
    return Half(
        made.reissued_as,
        first.producer_group,
        [
            HalfMessage(
                row.topic,
                row.key,
                row.tag,
                row.headers,
                row.content_type,
                row.body,
                row.body_digest,
                row.deliver_after_s,
            )
            for row in rows
        ],
        first.digest,
        context=first.context,
        policy=first.policy,
        traceparent=first.traceparent,
        reissued_from=made.transaction_id,
    )
