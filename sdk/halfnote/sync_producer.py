"""The synchronous producer: `TransactionProducer` for threads. All threads may share one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx

from halfnote.block import Binding, Block, OpenTransaction
from halfnote.conversation import Conversation
from halfnote.http import headers_of
from halfnote.listener import TransactionListener
from halfnote.outgoing import Outgoing
from halfnote.sync_driver import SyncDriver
from halfnote.tracing import current_traceparent
from halfnote.transaction import PlainResult, Registration, TransactionResult

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

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
        listener: TransactionListener[Any] | None = None,
        api_key: str | None = None,
        attempt_s: float = 5.0,
        half_within_s: float = 15.0,
        end_within_s: float = 60.0,
        traceparent: Callable[[], str | None] = current_traceparent,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.group = group
        self._listener = listener
        self._conversation = Conversation(group, attempt_s, half_within_s, end_within_s, traceparent)
        self._driver = SyncDriver(url, headers_of(api_key), transport)

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
        result's `error`.
        """
        if self._listener is None:
            raise ValueError("send needs a listener; without one use transaction()")
        options = {"transaction_id": transaction_id, "context": context, "check": check}
        work = self._listener.execute_local
        return self._driver.run(self._conversation.send(messages, arg, work, **options))

    @contextmanager
    def transaction(
        self,
        messages: Messages,
        *,
        transaction_id: UUID | None = None,
        context: Any = None,
        check: Mapping[str, Any] | None = None,
        binding: Binding | None = None,
    ) -> Iterator[OpenTransaction]:
        """Post the half; at the end of the block commit, or roll back if it raised. Raises HalfFailed.

        Commit the database transaction inside the block, or bind its session (`bind`).
        """
        block = Block(self._conversation, self._driver.later, binding)
        half = self._conversation.half(messages, transaction_id=transaction_id, context=context, check=check)
        transaction = self._driver.run(block.opening(half))
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
        return self._driver.run(self._conversation.plain(messages, transaction_id=transaction_id))

    def register(self, check_urls: Sequence[str], *, secret: str | None = None, **policy: Any) -> Registration:
        """Register the group: its check-back URL and its policy (`immunity_s`, `max_checks`, …; see the API).

        A repetition changes nothing. Raises Refused or Unconfirmed.
        """
        return self._driver.run(self._conversation.register(check_urls, policy, secret))

    def close(self, grace_s: float = 5.0) -> None:
        """Wait for ends in the background, at most `grace_s`; the rest is left to check-back."""
        self._driver.close(grace_s)

    def __enter__(self) -> "SyncTransactionProducer":
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
        block closes, `unknown` is posted and a check is requested; the end follows when it is over.
        """
        from halfnote.session_binding import SessionBinding

        binding = SessionBinding(self._session)
        try:
            with self._producer.transaction(messages, binding=binding, **half) as transaction:
                yield transaction
        finally:
            binding.release()
