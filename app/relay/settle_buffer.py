"""The outcomes of one stream that are not recorded yet, and when the relay is asked to record them."""

import asyncio
from collections.abc import Callable
from datetime import datetime

from app.store.relay.results import RETRY, Settlement

# How long an outcome waits for others before it is settled. Nothing waits for the receipt of a first delivery. After a
# crash such a message may be delivered again, and at a low load a settle for each would cost as much as the delivery.
SETTLE_WITHIN_S = 0.02
RECEIPT_WITHIN_S = 0.1


class SettleBuffer:
    """Outcomes wait in `finished` until `begin_settle`, and then in `settling` until the settle succeeds or fails.

    Those of a settle that failed wait in `repeated`, and are settled once more without others.

    Invariant: an outcome leaves the buffer only by `recorded`, or by `discard` when the lease is lost.
    """

    def __init__(self, request_turn: Callable[[], None]) -> None:
        self.finished: list[Settlement] = []
        self.settling: list[Settlement] = []
        self.repeated: list[Settlement] = []
        # Whether the relay was asked for a turn in which these outcomes are settled, and has not come yet.
        self.turn_requested = False
        self._wake_relay = request_turn
        self._timer: asyncio.TimerHandle | None = None

    @property
    def due(self) -> bool:
        """Whether outcomes wait for the relay's next turn."""
        return self.turn_requested and self.has_unsettled

    @property
    def has_unsettled(self) -> bool:
        """Whether outcomes wait for a settle."""
        return bool(self.finished or self.repeated)

    @property
    def records_earlier(self) -> bool:
        """Whether outcomes are recorded by an earlier settle than those that are added now."""
        return bool(self.settling or self.repeated)

    @property
    def offsets(self) -> set[int]:
        """The offsets of the messages whose outcomes are not recorded."""
        return {one.message.offset for part in (self.finished, self.settling, self.repeated) for one in part}

    def first_retries(self, now: datetime) -> dict[str, int]:
        """Return the lowest offset of each key that has retries which are not recorded.

        A delayed message that is not due keeps no other back.
        """
        lowest: dict[str, int] = {}
        for part in (self.finished, self.settling, self.repeated):
            for settlement in part:
                key, offset = settlement.message.key, settlement.message.offset
                delayed = settlement.first_at is None and settlement.due_at is not None and settlement.due_at > now
                if settlement.result is RETRY and key is not None and not delayed:
                    lowest[key] = min(offset, lowest.get(key, offset))
        return lowest

    def __len__(self) -> int:
        return len(self.finished) + len(self.settling) + len(self.repeated)

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
        # A turn without outcomes settles nothing. One that is added after it has to ask by itself.
        self.turn_requested = self.has_unsettled
        self._wake_relay()

    def begin_settle(self) -> list[Settlement]:
        """Return the outcomes to record; `recorded` or `restore` must follow."""
        self._cancel_timer()
        if self.repeated:
            self.settling, self.repeated, self.turn_requested = self.repeated, [], bool(self.finished)
        else:
            self.settling, self.finished, self.turn_requested = self.finished, [], False
        return self.settling

    def recorded(self) -> list[Settlement]:
        """Note that the outcomes in `settling` are recorded, and return them."""
        done, self.settling = self.settling, []
        return done

    def restore(self) -> None:
        """Queue the outcomes in `settling` once more, after a settle that failed or that may be committed.

        To settle the same outcomes twice changes nothing more. Together with others it could: a retry that was stored,
        claimed and delivered meanwhile would be stored again with its receipt.
        """
        self.repeated, self.settling = self.settling, []
        self.turn_requested = True

    def discard(self) -> None:
        """Forget the outcomes that wait."""
        self._cancel_timer()
        self.finished.clear()
        self.repeated.clear()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
