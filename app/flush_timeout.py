"""The timeout of a lane's flushes, one timer for all of them."""

import asyncio
from time import monotonic
from types import TracebackType
from typing import Any


class FlushTimeout:
    """A timeout like `asyncio.timeout` for one block at a time, over and over: its timer is left running from one block
    to the next, and looks what became of it when it rings, so that a block costs no timer of its own."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._task: asyncio.Task[Any] | None = None
        self._began = 0.0
        self._ringing = False
        self._expired = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._began = monotonic()
        self._expired = False
        if not self._ringing:
            self._ringing = True
            asyncio.get_running_loop().call_later(self._timeout_s, self._ring)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raises TimeoutError in the place of the cancellation that the timer sent, and leaves every other alone."""
        task, self._task = self._task, None
        if self._expired and task is not None and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _ring(self) -> None:
        self._ringing = False
        if self._task is None or self._expired:
            return
        left_s = self._began + self._timeout_s - monotonic()
        if left_s > 0:
            self._ringing = True
            asyncio.get_running_loop().call_later(left_s, self._ring)
            return
        self._expired = True
        self._task.cancel()
