"""The synchronous producer: `TransactionProducer` for threads. All threads may share one."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx

from halfnote.block import Binding, Block, OpenTransaction
from halfnote.check_answering import SyncCheckAnswering
from halfnote.claiming import Claiming
from halfnote.conversation import Conversation
from halfnote.errors import HalfFailed, PlainFailed
from halfnote.exchange import REFUSED_WITHIN_S
from halfnote.hosting import require_barrier, require_listener
from halfnote.http import headers_of
from halfnote.listener import CheckListener, TransactionListener
from halfnote.many import Many, ToPost
from halfnote.outgoing import Outgoing, serializable
from halfnote.sync_driver import SyncDriver
from halfnote.tracing import current_traceparent
from halfnote.transaction import PlainResult, Registration, Transaction, TransactionResult
from halfnote.verdicts import Verdict

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from halfnote.barrier import Barrier

Messages = Outgoing | Sequence[Outgoing]


class SyncTransactionProducer:
    """TransactionProducer without an event loop; its listener's functions are plain functions.

    Ends that fail at first are repeated by a thread in the background. It may be made before a fork.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        barrier: "Barrier | None" = None,
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.group, self.barrier = group, barrier
        self._listener = listener
        require_barrier(barrier, asynchronous=False)
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
        self._driver = SyncDriver(url, headers_of(api_key), transport, batching=batching)
        self._answering: list[SyncCheckAnswering] = []

    def send(
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
        return self._driver.run(self._conversation.send(messages, arg, work, **options))

    def begin(
        self,
        messages: Messages,
        connection: Any = None,
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
    ) -> AbstractContextManager[OpenTransaction]:
        """Return a block that is the whole transaction: half, database transaction, barrier, commit, end.

        The half is posted, then the database transaction begins and enters the barrier. The end of the block commits,
        or rolls back after an exception, and posts the end. `connection`: what `barrier.enter` takes; by default a new
        one of the barrier's database, as `tx.connection` (with Django, the thread's). In a database transaction of the
        caller that is open already, the end is left to check-back. Raises HalfFailed, BarrierRefused, NotCommitted if
        the code rolled the database transaction back; ValueError without a barrier.
        """
        if self.barrier is None:
            raise ValueError("begin needs a barrier: SyncTransactionProducer(…, barrier=barrier)")
        options = {"transaction_id": transaction_id, "context": context, "check": check}
        from halfnote.begin import sync_unit_of

        return sync_unit_of(self, self.barrier.database, messages, connection, options)

    @contextmanager
    def transaction(
        self,
        messages: Messages,
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
    ) -> Iterator[OpenTransaction]:
        """Post the half; at the end of the block commit, or roll back if it raised. Raises HalfFailed.

        With a barrier, a chosen id whose rollback is recorded raises BarrierRefused.
        Commit the database transaction inside the block. With a barrier, `begin` is the better form: here the block
        must call `barrier.enter`; at its end it raises NotEntered or NotCommitted if it did not, or did not commit.
        Without a barrier any exception is posted as a rollback, also that of a commit whose answer was lost.
        """
        options = {"transaction_id": transaction_id, "context": context, "check": check}
        with self.watched(None, messages, **options) as transaction:
            yield transaction

    @contextmanager
    def watched(self, binding: Binding | None, messages: Messages, **half: Any) -> Iterator[OpenTransaction]:
        """Do the same, but post the outcome of the database transaction that a binding watches.

        With a barrier, the code that made the binding enters it: the half says so to its checks.
        """
        self._driver.require_open()
        block = Block(self._conversation, self._driver.follow, binding)
        enters = binding is not None and self.barrier is not None
        half_posted = self._conversation.half(messages, enters=enters, **half)
        transaction = self._driver.run(block.opening(half_posted))
        try:
            yield transaction
        except BaseException as error:
            self._driver.run(block.closing(error))
            raise
        self._driver.run(block.closing(None))

    def bind(self, session: "Session") -> "SyncBoundProducer":
        """Return a producer whose blocks end with the commit or rollback of an SQLAlchemy session."""
        return SyncBoundProducer(self, session)

    def send_plain(self, messages: Messages, *, transaction_id: UUID | None = None) -> PlainResult:
        """Send plain messages, without a half and an end. Raises PlainFailed, which has the id for a repetition."""
        self._driver.require_open()
        return self._driver.run(self._conversation.plain(messages, transaction_id=transaction_id))

    def post_halves(self, halves: Sequence[ToPost]) -> list[Transaction | HalfFailed]:
        """Post up to 500 halves in one request; return each transaction, or why it did not begin.

        Do the local work of those that began, enter the barrier for each, commit, then `post_ends`. What does not come
        to that is left to check-back. Raises ValueError or TypeError.
        """
        self._driver.require_open()
        return self._driver.run(self._many.halves(halves))

    def post_ends(self, ends: Sequence[tuple[Transaction, Verdict]]) -> list[TransactionResult]:
        """Post the verdicts of up to 500 transactions in one request, after their database transaction is over.

        The verdicts are the caller's: the barrier is neither read nor written. An end that fails is repeated in the
        background, and after that left to check-back. Raises ValueError.
        """
        return self._driver.run(self._many.ends(ends))

    def send_plain_many(self, sent: Sequence[ToPost]) -> list[PlainResult | PlainFailed]:
        """Send plain messages of up to 500 transactions in one request; return the result of each.

        Raises ValueError or TypeError.
        """
        self._driver.require_open()
        return self._driver.run(self._many.plain(sent))

    def register(self, check_urls: Sequence[str], *, secret: str | None = None, **policy: Any) -> Registration:
        """Register the group: its check-back URL and its policy (`immunity_s`, `max_checks`, …; see the API).

        A repetition changes nothing, and says that the service has started. With a producer's key only that is allowed:
        what would change the group, or register it, raises Refused (`forbidden`), and an admin does it.
        Raises Refused or Unconfirmed.
        """
        self._driver.require_open()
        return self._driver.run(self._conversation.register(check_urls, policy, secret))

    def answer_checks(self, listener: CheckListener | None = None) -> SyncCheckAnswering:
        """Answer the group's checks in a thread, without an endpoint, until `close`; the group has `checks: "claim"`.

        `listener`: a barrier or a listener (default: the producer's barrier). Call it once in each process. What fails
        is logged and tried again. Raises ValueError or TypeError.
        """
        self._driver.require_open()
        answering = SyncCheckAnswering(self._claiming(listener), self._driver)
        self._answering.append(answering)
        if self._driver.is_closed():
            # Its listener, a signal's handler or another thread closed the producer meanwhile.
            answering.stop(0)
        return answering

    def answer_due_checks(self, listener: CheckListener | None = None) -> int:
        """Answer the group's checks that are due now; return how many. For programs that run from time to time.

        Raises Refused or Unconfirmed.
        """
        self._driver.require_open()
        claiming, count = self._claiming(listener), 0
        checks = self._driver.run(claiming.claimed(0, started=True))
        while checks:
            count += self._driver.run(claiming.answered(checks))
            checks = self._driver.run(claiming.claimed(0, started=False))
        return count

    def close(self, grace_s: float = 5.0) -> None:
        """Wait for ends in the background and for answers to checks, `grace_s` seconds at most for both together.

        A request with ends that is under way then is waited for too, until `attempt_s` after its beginning. So no
        thread for ends is left. The log says how many transactions are left to check-back. From now on all that would
        begin raises ProducerClosed, until `with` opens it again; what has begun ends, and posts its end.
        A signal's handler may call it, and so may a listener. A close beside another one, also in a handler above it,
        waits for the same ends and answers; the grace of the ends is the one that is over first.
        """
        until = time.monotonic() + grace_s
        answering = list(self._answering)
        try:
            for one in answering:
                one.stop(0)
            self._driver.end_background(grace_s)
            for one in answering:
                one.stop(max(0.0, until - time.monotonic()))
        finally:
            # Also after an exception of a signal's handler, which may have come before some were stopped.
            for one in answering:
                one.stop(0)
                if not one.running:
                    # Another close may have removed it.
                    with suppress(ValueError):
                        self._answering.remove(one)
            self._driver.disconnect()

    def _claiming(self, listener: CheckListener | None) -> Claiming:
        chosen = self.barrier if listener is None else listener
        if chosen is None:
            raise ValueError("answering checks needs a barrier or a listener: answer_checks(barrier)")
        require_listener(chosen, asynchronous=False)
        return Claiming(self._conversation, chosen)

    def __enter__(self) -> "SyncTransactionProducer":
        """Open it, also again after a close."""
        self._driver.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class SyncBoundProducer:
    """A producer together with an SQLAlchemy session."""

    def __init__(self, producer: SyncTransactionProducer, session: "Session") -> None:
        self._producer, self._session = producer, session

    @contextmanager
    def transaction(self, messages: Messages, **half: Any) -> Iterator[OpenTransaction]:
        """Do the same as the producer's method, but post the outcome of the session's database transaction as the end.

        It is the one that is open already, else the first that is committed in the block. If it is still open when the
        block closes, `unknown` is posted and a check is requested; the end follows when it is over. With a barrier, the
        session's database transaction enters it by itself.
        """
        from halfnote.session_binding import SessionBinding

        binding = SessionBinding(self._session)
        barrier = self._producer.barrier
        try:
            with self._producer.watched(binding, messages, **half) as transaction:
                if barrier is not None:
                    binding.enter_with(barrier, transaction)
                yield transaction
                binding.drop_at_exit()
        finally:
            binding.release()
