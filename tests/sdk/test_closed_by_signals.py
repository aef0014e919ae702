"""`close` in a signal's handler, at each line of the driver at which the signal may come."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import halfnote.sync_driver
import httpx
import pytest
from halfnote import Outgoing, ProducerClosed, SyncTransactionProducer

from tests.sdk.coordinators import Scripted

ORDER = Outgoing("order", {"order": 1030})
# For a busy machine. A close that hangs takes it all.
SOON_S = 50.0
LINES_MOST = 1000


class Done(BaseException):
    """What a signal's handler raises, as SystemExit."""


class Run:
    """Two blocks on a thread of their own, whose handler is called before a line of the driver."""

    def __init__(self, line: int, *, raises: bool, **options: Any) -> None:
        self._left, self._raises, self._in_handler = line, raises, False
        self.halfnote, self.clients, self.outcome = Scripted(), list[httpx.Client](), None
        self.was_called, self.is_over = False, threading.Event()
        self.producer = SyncTransactionProducer(
            "http://halfnote", group="shop", transport=self.halfnote.transport(), **options
        )
        made = self.producer._driver._made

        def noted() -> httpx.Client:
            self.clients.append(made())
            return self.clients[-1]

        self.producer._driver._made = noted  # type: ignore[method-assign]

    def run(self) -> None:
        """Run the blocks. Raises AssertionError if they hang."""
        # A thread, so that what hangs ends this test alone.
        threading.Thread(target=self._work, daemon=True).start()
        assert self.is_over.wait(SOON_S), "it hangs"
        assert self.outcome is None or isinstance(self.outcome, (Done, ProducerClosed)), self.outcome

    def _work(self) -> None:
        sys.settrace(self._traced)
        try:
            for _ in range(2):
                with self.producer.transaction(ORDER):
                    pass
        except BaseException as error:
            self.outcome = error
        finally:
            sys.settrace(None)
            self.producer.close(SOON_S)
            self.is_over.set()

    def _traced(self, frame: FrameType, event: str, _: Any) -> "Callable[..., Any] | None":
        if frame.f_code.co_filename != halfnote.sync_driver.__file__:
            return None
        if event == "line" and not self.was_called:
            self._left -= 1
            if self._left < 0:
                self.was_called = True
                self.producer.close(SOON_S)
                if self._raises:
                    raise Done
        return self._traced


@pytest.mark.parametrize("wait_for_end", [True, False])
@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_a_handler_may_close_at_each_line(
    wait_for_end: bool, batching: bool, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = {*threading.enumerate()}
    for line in range(LINES_MOST):
        run = Run(line, raises=raises, batching=batching, wait_for_end=wait_for_end)
        run.run()
        if not run.was_called:
            break
        halves = [half["transaction_id"] for half in run.halfnote.asked("/half")]
        ends = [end["transaction_id"] for end in run.halfnote.ends()]
        if raises:
            # What is under way is left to check-back, but nothing is posted twice.
            assert len(ends) == len(set(ends)), line
            assert set(ends) <= set(halves), line
        else:
            assert sorted(ends) == sorted(halves), line
            assert all(client.is_closed for client in run.clients), line
            assert "left to check-back" not in caplog.text, line
            assert [
                one.name for one in threading.enumerate() if one not in before and one.name == "halfnote-ends"
            ] == []
    assert 40 < line < LINES_MOST
