"""Load limits of one process: requests in flight in total and for each key, each key's rate, bytes of all bodies.

A request over a limit is refused before its body is read, or as soon as the bytes of its body exceed the limit. Each
process of one `halfnote serve` counts its own requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

from app.config import Settings
from app.errors import Overloaded, TooManyRequests
from app.permissions import Caller

RETRY_AFTER_S = 1
# The id under which the configured admin key counts. Stored keys have ids from 1.
CONFIGURED_ID = 0
# The name in metrics of all people without a key, who signed in by OpenID Connect; they count one by one.
PEOPLE = "OpenID Connect"


@dataclass(slots=True)
class KeyUsage:
    """Usage of one key: requests in flight, and a token bucket that holds one second of the key's rate."""

    in_flight: int
    tokens: float
    filled_at: float


class LoadLimits:
    """The limits of one process, and its load now.

    `refused(name, key_id, limit)` is called for each request that the limit `rate` or `in_flight` of a key refuses.
    """

    def __init__(self, settings: Settings, refused: Callable[[str, int, str], None]) -> None:
        self._refused = refused
        self.in_flight = 0
        self.held_bytes = 0
        self._most_bytes = settings.bodies_max_bytes
        self._most = settings.in_flight_max
        self._rate = settings.key_rate_per_s
        self._most_of_key = settings.key_in_flight_max or inf
        self._by_key = settings.key_rate_per_s is not None or settings.key_in_flight_max is not None
        self._usages: dict[int | str, KeyUsage] = {}

    def take(self, caller: Caller) -> KeyUsage | None:
        """Count a request that begins. Pass the returned usage to `give` when the request ends.

        Raises Overloaded or TooManyRequests.
        """
        if self.in_flight >= self._most:
            raise Overloaded(
                f"{self.in_flight} requests are in flight here; repeat later.", retry_after_s=RETRY_AFTER_S
            )
        usage = None
        # A caller with a role has a key. Without a role, auth is off.
        if (self._by_key or caller.rate_per_s is not None) and caller.role is not None:
            usage = self._take_of_key(caller, _id_of(caller), monotonic())
        self.in_flight += 1
        return usage

    def take_more(self, caller: Caller, transactions: int) -> None:
        """Count further transactions of a request that began, in the rate of its key.

        The request is not refused for them: the key's next requests wait until the rate has made up for them.
        """
        usage = self._usages.get(_id_of(caller)) if caller.role is not None else None
        if usage is not None and (caller.rate_per_s or self._rate) is not None:
            usage.tokens -= transactions

    def hold(self, size: int) -> None:
        """Count received bytes of a body. Raises Overloaded, and then does not count them."""
        if self.held_bytes + size > self._most_bytes:
            raise Overloaded(
                f"Requests in flight here hold {self.held_bytes} bytes of bodies; repeat later.",
                retry_after_s=RETRY_AFTER_S,
            )
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Subtract bytes that are no longer held."""
        self.held_bytes -= size

    def give(self, usage: KeyUsage | None, held: int) -> None:
        """Count a request as ended, and subtract `held` bytes of its body."""
        self.in_flight -= 1
        self.held_bytes -= held
        if usage is not None:
            usage.in_flight -= 1

    def _take_of_key(self, caller: Caller, key_id: int | str, now: float) -> KeyUsage:
        rate = caller.rate_per_s or self._rate
        burst = max(1.0, rate or 1.0)
        usage = self._usages.get(key_id)
        if usage is None:
            # Bounded by the number of keys, which only admins create, and of people with a role.
            usage = self._usages[key_id] = KeyUsage(0, burst, now)
        if usage.in_flight >= self._most_of_key:
            self._count_refusal(caller, "in_flight")
            raise TooManyRequests(
                f"{usage.in_flight} requests of this key are in flight; repeat later.", retry_after_s=RETRY_AFTER_S
            )
        if rate is not None:
            usage.tokens = min(burst, usage.tokens + (now - usage.filled_at) * rate)
            usage.filled_at = now
            if usage.tokens < 1:
                self._count_refusal(caller, "rate")
                wait_s = max(1, ceil((1 - usage.tokens) / rate))
                raise TooManyRequests(
                    f"This key may send {rate:g} requests per second; repeat later.", retry_after_s=wait_s
                )
            usage.tokens -= 1
        usage.in_flight += 1
        return usage

    def _count_refusal(self, caller: Caller, limit: str) -> None:
        name = str(caller.name) if caller.subject is None else PEOPLE
        self._refused(name, caller.key_id or CONFIGURED_ID, limit)


def _id_of(caller: Caller) -> int | str:
    return caller.key_id or caller.subject or CONFIGURED_ID
