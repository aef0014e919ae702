"""A lease that at most one process holds: the one whose loop does the work of all."""

from datetime import datetime, timedelta

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.relay.leases import Lease, claim, release, renew


class SingleLease:
    """The lease `name`, for `lasts` from each renewal."""

    def __init__(self, name: str, lasts: timedelta) -> None:
        self._name, self._lasts = name, lasts
        self._lease: Lease | None = None

    async def held(self, connection: Connection, owner: str, now: datetime) -> bool:
        """Renew or take the lease; return whether this process holds it."""
        until = now + self._lasts
        if self._lease is not None and await renew(connection, {self._name: self._lease.epoch}, owner, until):
            return True
        self._lease = next(iter(await claim(connection, [self._name], owner, until, 1, now)), None)
        return self._lease is not None

    async def release(self, runtime: Runtime) -> None:
        """Release the lease, if this process holds it."""
        if self._lease is not None:
            async with runtime.database.connection() as connection:
                await release(connection, {self._name: self._lease.epoch}, runtime.owner, runtime.clock.now())
