"""How much one process takes on: requests under way, of all callers and of each key, how many a second of each key, and
the bytes of all bodies.

What is over a limit is refused before its body is read, or as soon as it has no room. A worker of
`halfnote serve --workers N` counts its own.
"""

from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

from app.access import Caller
from app.config import Settings
from app.errors import Overloaded, TooManyRequests

RETRY_AFTER_S = 1
# As which the key that is in no database is counted; stored ones begin with 1.
CONFIGURED_ID = 0


@dataclass(slots=True)
class Share:
    """What one key has: requests under way, and a bucket that fills by its rate up to a second's worth."""

    in_flight: int
    tokens: float
    filled_at: float


class Load:
    """The limits of one process, and what is under way in it."""

    def __init__(self, settings: Settings) -> None:
        self.in_flight = 0
        self.held_bytes = 0
        self._most_bytes = settings.bodies_max_bytes
        self._most = settings.in_flight_max
        self._rate = settings.key_rate_per_s
        self._most_of_key = settings.key_in_flight_max or inf
        self._by_key = settings.key_rate_per_s is not None or settings.key_in_flight_max is not None
        self._shares: dict[int, Share] = {}

    def take(self, caller: Caller) -> Share | None:
        """Count a request that begins; give what this returns to `give` when it is over.

        Raises Overloaded or TooManyRequests.
        """
        if self.in_flight >= self._most:
            raise Overloaded(f"{self.in_flight} requests are under way here.", retry_after_s=RETRY_AFTER_S)
        share = None
        # With a role there is a key; without one auth is off.
        if (self._by_key or caller.rate_per_s is not None) and caller.role is not None:
            share = self._take_share(caller, caller.key_id or CONFIGURED_ID, monotonic())
        self.in_flight += 1
        return share

    def hold(self, size: int) -> None:
        """Count bytes of a body that came. Raises Overloaded, and then does not count them."""
        if self.held_bytes + size > self._most_bytes:
            raise Overloaded(
                f"Requests with {self.held_bytes} bytes of bodies are under way here.", retry_after_s=RETRY_AFTER_S
            )
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Count bytes as gone."""
        self.held_bytes -= size

    def give(self, share: Share | None, held: int) -> None:
        """Count a request as over, and so many bytes of its body."""
        self.in_flight -= 1
        self.held_bytes -= held
        if share is not None:
            share.in_flight -= 1

    def _take_share(self, caller: Caller, key_id: int, now: float) -> Share:
        rate = caller.rate_per_s or self._rate
        burst = max(1.0, rate or 1.0)
        share = self._shares.get(key_id)
        if share is None:
            # As many as there are keys, which only admins make.
            share = self._shares[key_id] = Share(0, burst, now)
        if share.in_flight >= self._most_of_key:
            raise TooManyRequests(f"{share.in_flight} requests of this key are under way.", retry_after_s=RETRY_AFTER_S)
        if rate is not None:
            share.tokens = min(burst, share.tokens + (now - share.filled_at) * rate)
            share.filled_at = now
            if share.tokens < 1:
                wait_s = max(1, ceil((1 - share.tokens) / rate))
                raise TooManyRequests(f"This key may send {rate:g} requests a second.", retry_after_s=wait_s)
            share.tokens -= 1
        share.in_flight += 1
        return share
