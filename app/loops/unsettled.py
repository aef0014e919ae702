"""What of one stream is over and not yet recorded, and when it is time to record it."""

import asyncio
from collections.abc import Callable

from app.store.settling import Settlement

# How long an outcome waits for company before it is settled.
SETTLE_WITHIN_S = 0.02


class Unsettled:
    """Outcomes wait in `finished` until `hand_out`, and then in `settling` until it is known what became of them.

    `ring` calls for the relay's next turn.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self.finished: list[Settlement] = []
        self.settling: list[Settlement] = []
        # Whether the relay was called and has not come yet.
        self.ringing = False
        self._ring = ring
        self._alarm: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.finished) + len(self.settling)

    def add(self, settlement: Settlement, *, urgent: bool) -> None:
        """Queue an outcome for the next settle: at once, or with what comes within SETTLE_WITHIN_S."""
        self.finished.append(settlement)
        if self.ringing:
            return
        if urgent:
            self.ring()
        elif self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(SETTLE_WITHIN_S, self.ring)

    def ring(self) -> None:
        """Call for the relay's next turn."""
        self._disarm()
        self.ringing = True
        self._ring()

    def hand_out(self) -> list[Settlement]:
        """Return what is to be recorded; `settled` or `again` must follow."""
        self._disarm()
        self.settling, self.finished, self.ringing = self.finished, [], False
        return self.settling

    def settled(self) -> list[Settlement]:
        """Note that what was handed out is recorded, and return it."""
        done, self.settling = self.settling, []
        return done

    def again(self) -> None:
        """Note that it is not known whether it is: to settle the same again changes nothing more."""
        self.finished[:0] = self.settling
        self.settling = []
        self.ringing = True

    def drop(self) -> None:
        """Forget what waits."""
        self._disarm()
        self.finished.clear()

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
