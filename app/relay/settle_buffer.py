"""The outcomes of one stream that are not recorded yet, and when the relay is asked to record them."""

import asyncio
from collections.abc import Callable

from app.store.relay.results import Settlement

# How long an outcome waits for others before it is settled. Nothing waits for the receipt of a first delivery. After a
# crash such a message may be delivered again, and at a low load a settle for each would cost as much as the delivery.
SETTLE_WITHIN_S = 0.02
RECEIPT_WITHIN_S = 0.1


class SettleBuffer:
    """Outcomes wait in `finished` until `begin_settle`, and then in `settling` until the settle succeeds or fails.

    Invariant: an outcome leaves the buffer only by `recorded`, or by `discard` when the lease is lost.
    """

    def __init__(self, request_turn: Callable[[], None]) -> None:
        self.finished: list[Settlement] = []
        self.settling: list[Settlement] = []
        # Whether the relay was asked for a turn and has not come yet.
        self.turn_requested = False
        self._wake_relay = request_turn
        self._timer: asyncio.TimerHandle | None = None

    @property
    def due(self) -> bool:
        """Whether outcomes wait for the relay's next turn."""
        return self.turn_requested and bool(self.finished)

    def __len__(self) -> int:
        return len(self.finished) + len(self.settling)

    def add(self, settlement: Settlement, within_s: float) -> None:
        """Queue an outcome for the next settle: at once (0), or together with others within a time."""
        self.finished.append(settlement)
        if self.turn_requested:
            return
        if not within_s:
            self.request_turn()
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + within_s
        if self._timer is None or self._timer.when() > at:
            self._cancel_timer()
            self._timer = loop.call_at(at, self.request_turn)

    def request_turn(self) -> None:
        """Ask for the relay's next turn."""
        self._cancel_timer()
        self.turn_requested = True
        self._wake_relay()

    def begin_settle(self) -> list[Settlement]:
        """Return the outcomes to record; `recorded` or `restore` must follow."""
        self._cancel_timer()
        self.settling, self.finished, self.turn_requested = self.finished, [], False
        return self.settling

    def recorded(self) -> list[Settlement]:
        """Note that the outcomes in `settling` are recorded, and return them."""
        done, self.settling = self.settling, []
        return done

    def restore(self) -> None:
        """Queue the outcomes in `settling` once more, after a settle with an unknown result.

        To settle the same outcomes twice changes nothing more.
        """
        self.finished[:0] = self.settling
        self.settling = []
        self.turn_requested = True

    def discard(self) -> None:
        """Forget the outcomes that wait."""
        self._cancel_timer()
        self.finished.clear()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
