"""The asynchronous producer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx

from halfnote.async_driver import AsyncDriver
from halfnote.block import Binding, Block, OpenTransaction
from halfnote.check_answering import CheckAnswering, is_over
from halfnote.claiming import Claiming
from halfnote.conversation import Conversation
from halfnote.errors import HalfFailed, PlainFailed
from halfnote.exchange import REFUSED_WITHIN_S
from halfnote.hosting import require_barrier, require_listener
from halfnote.http import headers_of
from halfnote.listener import CheckListener, TransactionListener
from halfnote.many import Many, ToPost
from halfnote.outgoing import Outgoing, serializable
from halfnote.tracing import current_traceparent
from halfnote.transaction import PlainResult, Registration, Transaction, TransactionResult
from halfnote.verdicts import Verdict

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from halfnote.barrier import AsyncBarrier

Messages = Outgoing | Sequence[Outgoing]


class TransactionProducer:
    """Sends messages that are delivered only if this service's database transaction is committed.

    `group`: the producer group, registered by `register`. `barrier`: the barrier in the service's database, for
    `begin`. `listener`: `send` runs its `execute_local`. Time limits: `attempt_s` for one request; `half_within_s` for
    all attempts to post a half; `end_within_s` for all attempts to post an end, in the background, after which Halfnote
    sends a check; `refused_within_s` for a half while connects are refused, because nothing can have been stored then.
    `wait_for_end=False`: a block ends when its end is on its way, as with RocketMQ's client, which saves the wait for
    a second write to disk; check-back decides if the end is lost, and a conflict is only in the log.
    Halves, ends and plain messages that callers post at the same time share requests, which takes less processor time
    of the program and of Halfnote. One waits only while two requests of its kind are under way; a request that takes
    longer than a quarter of a second keeps none waiting. Large ones, and all with `batching=False`, have a request of
    their own.
    `serialize` is called with a value that JSON does not have, and returns one that it has (default: times, `Decimal`
    and `UUID`). Make one and use it everywhere; `close` it, or use `async with`. Raises TypeError or ValueError.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        barrier: "AsyncBarrier | None" = None,
        listener: TransactionListener[Any] | None = None,
        api_key: str | None = None,
        attempt_s: float = 5.0,
        half_within_s: float = 15.0,
        end_within_s: float = 60.0,
        refused_within_s: float = REFUSED_WITHIN_S,
        wait_for_end: bool = True,
        batching: bool = True,
        serialize: Callable[[Any], Any] = serializable,
        traceparent: Callable[[], str | None] = current_traceparent,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.group, self.barrier = group, barrier
        self._listener = listener
        require_barrier(barrier, asynchronous=True)
        self._conversation = Conversation(
            group,
            attempt_s,
            half_within_s,
            end_within_s,
            traceparent,
            barrier=barrier,
            refused_within_s=refused_within_s,
            serialize=serialize,
            wait_for_end=wait_for_end,
        )
        self._many = Many(self._conversation)
        self._driver = AsyncDriver(url, headers_of(api_key), transport, batching=batching)
        # Of all event loops.
        self._answering: list[CheckAnswering] = []

    async def send(
        self,
        messages: Messages,
        arg: Any = None,
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
    ) -> TransactionResult:
        """Post the half, run `listener.execute_local(transaction, arg)`, post the end.

        `context`: up to 4 KiB of JSON, which every check returns. `check`: a check policy for this transaction. Raises
        HalfFailed (nothing has happened), ListenerError (left to check-back). An exception of the local work is the
        result's `error`, and without a barrier a rollback: return UNKNOWN after an error of the database's commit.
        """
        if self._listener is None:
            raise ValueError("send needs a listener; without one use transaction()")
        self._driver.require_open()
        options = {"transaction_id": transaction_id, "context": context, "check": check}
        work = self._listener.execute_local
        return await self._driver.run(self._conversation.send(messages, arg, work, **options))

    def begin(
        self,
        messages: Messages,
        connection: Any = None,
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
    ) -> AbstractAsyncContextManager[OpenTransaction]:
        """Return a block that is the whole transaction: half, database transaction, barrier, commit, end.

        The half is posted, then the database transaction begins and enters the barrier. The end of the block commits,
        or rolls back after an exception, and posts the end. `connection`: what `barrier.enter` takes; by default a new
        one of the barrier's database, as `tx.connection` (with Django, the thread's). In a database transaction of the
        caller that is open already, the end is left to check-back. Raises HalfFailed, BarrierRefused, NotCommitted if
        the code rolled the database transaction back; ValueError without a barrier.
        """
        if self.barrier is None:
            raise ValueError("begin needs a barrier: TransactionProducer(…, barrier=barrier)")
        options = {"transaction_id": transaction_id, "context": context, "check": check}
        from halfnote.begin import unit_of

        return unit_of(self, self.barrier.database, messages, connection, options)

    @asynccontextmanager
    async def transaction(
        self,
        messages: Messages,
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[OpenTransaction]:
        """Post the half; at the end of the block commit, or roll back if it raised. Raises HalfFailed.

        With a barrier, a chosen id whose rollback is recorded raises BarrierRefused.
        Commit the database transaction inside the block. With a barrier, `begin` is the better form: here the block
        must call `barrier.enter`; at its end it raises NotEntered or NotCommitted if it did not, or did not commit.
        Without a barrier any exception is posted as a rollback, also that of a commit whose answer was lost.
        """
        options = {"transaction_id": transaction_id, "context": context, "check": check}
        async with self.watched(None, messages, **options) as transaction:
            yield transaction

    @asynccontextmanager
    async def watched(self, binding: Binding | None, messages: Messages, **half: Any) -> AsyncIterator[OpenTransaction]:
        """Do the same, but post the outcome of the database transaction that a binding watches.

        With a barrier, the code that made the binding enters it: the half says so to its checks.
        """
        self._driver.require_open()
        block = Block(self._conversation, self._driver.follow, binding)
        enters = binding is not None and self.barrier is not None
        half_posted = self._conversation.half(messages, enters=enters, **half)
        transaction = await self._driver.run(block.opening(half_posted))
        try:
            yield transaction
        except BaseException as error:
            await self._driver.run(block.closing(error))
            raise
        await self._driver.run(block.closing(None))

    def bind(self, session: "AsyncSession") -> "BoundProducer":
        """Return a producer whose blocks end with the commit or rollback of an SQLAlchemy session."""
        return BoundProducer(self, session)

    async def send_plain(self, messages: Messages, *, transaction_id: UUID | None = None) -> PlainResult:
        """Send plain messages, without a half and an end. Raises PlainFailed, which has the id for a repetition."""
        self._driver.require_open()
        return await self._driver.run(self._conversation.plain(messages, transaction_id=transaction_id))

    async def post_halves(self, halves: Sequence[ToPost]) -> list[Transaction | HalfFailed]:
        """Post up to 500 halves in one request; return each transaction, or why it did not begin.

        Do the local work of those that began, enter the barrier for each, commit, then `post_ends`. What does not come
        to that is left to check-back. Raises ValueError or TypeError.
        """
        self._driver.require_open()
        return await self._driver.run(self._many.halves(halves))

    async def post_ends(self, ends: Sequence[tuple[Transaction, Verdict]]) -> list[TransactionResult]:
        """Post the verdicts of up to 500 transactions in one request, after their database transaction is over.

        The verdicts are the caller's: the barrier is neither read nor written. An end that fails is repeated in the
        background, and after that left to check-back. Raises ValueError.
        """
        return await self._driver.run(self._many.ends(ends))

    async def send_plain_many(self, sent: Sequence[ToPost]) -> list[PlainResult | PlainFailed]:
        """Send plain messages of up to 500 transactions in one request; return the result of each.

        Raises ValueError or TypeError.
        """
        self._driver.require_open()
        return await self._driver.run(self._many.plain(sent))

    async def register(self, check_urls: Sequence[str], *, secret: str | None = None, **policy: Any) -> Registration:
        """Register the group: its check-back URL and its policy (`immunity_s`, `max_checks`, …; see the API).

        A repetition changes nothing, and says that the service has started. With a producer's key only that is allowed:
        what would change the group, or register it, raises Refused (`forbidden`), and an admin does it.
        Raises Refused or Unconfirmed.
        """
        self._driver.require_open()
        return await self._driver.run(self._conversation.register(check_urls, policy, secret))

    def answer_checks(self, listener: CheckListener | None = None) -> CheckAnswering:
        """Answer the group's checks in a task, without an endpoint, until `close`; the group has `checks: "claim"`.

        `listener`: a barrier or a listener (default: the producer's barrier). Call it once in each process. What fails
        is logged and tried again. Raises ValueError or TypeError.
        """
        self._driver.require_open()
        answering = CheckAnswering(self._claiming(listener), self._driver)
        self._answering.append(answering)
        return answering

    async def answer_due_checks(self, listener: CheckListener | None = None) -> int:
        """Answer the group's checks that are due now; return how many. For programs that run from time to time.

        Raises Refused or Unconfirmed.
        """
        self._driver.require_open()
        claiming, count = self._claiming(listener), 0
        checks = await self._driver.run(claiming.claimed(0, started=True))
        while checks:
            count += await self._driver.run(claiming.answered(checks))
            checks = await self._driver.run(claiming.claimed(0, started=False))
        return count

    async def close(self, grace_s: float = 5.0) -> None:
        """Wait for ends in the background and for answers to checks, `grace_s` seconds at most for both together.

        The log says how many transactions are left to check-back. From now on, on this event loop, all that would begin
        raises ProducerClosed, until `async with` opens it again; what has begun ends, and posts its end. A listener may
        call it. A close beside another one waits for the same ends and answers, until the first grace is over.
        """
        ending, loop = self._driver.end_background(grace_s), asyncio.get_running_loop()
        try:
            await asyncio.gather(ending, *(one.stop(grace_s) for one in list(self._answering) if one.loop is loop))
        finally:
            # Also if this is canceled.
            for one in list(self._answering):
                if (one.loop is loop or one.loop.is_closed()) and is_over(one):
                    # Another close may have removed it.
                    with suppress(ValueError):
                        self._answering.remove(one)
            await self._driver.disconnect()

    def _claiming(self, listener: CheckListener | None) -> Claiming:
        chosen = self.barrier if listener is None else listener
        if chosen is None:
            raise ValueError("answering checks needs a barrier or a listener: answer_checks(barrier)")
        require_listener(chosen, asynchronous=True)
        return Claiming(self._conversation, chosen)

    async def __aenter__(self) -> "TransactionProducer":
        """Open it on this event loop, also again after a close."""
        self._driver.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


class BoundProducer:
    """A producer together with an SQLAlchemy session."""

    def __init__(self, producer: TransactionProducer, session: "AsyncSession") -> None:
        self._producer, self._session = producer, session

    @asynccontextmanager
    async def transaction(self, messages: Messages, **half: Any) -> AsyncIterator[OpenTransaction]:
        """Do the same as the producer's method, but post the outcome of the session's database transaction as the end.

        It is the one that is open already, else the first that is committed in the block. If it is still open when the
        block closes, `unknown` is posted and a check is requested; the end follows when it is over. With a barrier, the
        session's database transaction enters it by itself.
        """
        from halfnote.session_binding import SessionBinding

        binding = SessionBinding(self._session.sync_session)
        barrier = self._producer.barrier
        try:
            async with self._producer.watched(binding, messages, **half) as transaction:
                if barrier is not None:
                    await self._session.run_sync(lambda _: binding.enter_with(barrier, transaction))
                yield transaction
                if transaction.rolled_back is not None:
                    await self._session.run_sync(lambda _: binding.drop_at_exit())
        finally:
            binding.release()
