"""Who is let in: keys as every process knows them, without asking the database for each request.

A process knows all keys by their SHA-256. `app/loops/news.py` asks once a second whether any was changed; so a new
key is known, and a revoked one refused, within KNOWN_WITHIN_S on every replica that reaches the database. Expiry needs
no news: it is judged for each request.
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address
from math import inf

from app.access import ALL, ANYBODY, NOBODY, Caller, Role, Scope, digest_of
from app.clock import Clock
from app.config import Settings
from app.door import Scope as AsgiScope
from app.errors import NotThisMachine, Unauthenticated
from app.rules import OPEN, PEOPLE, Roles
from app.store.api_keys import ApiKey

KNOWN_WITHIN_S = 2
CONFIGURED = "HALFNOTE_ADMIN_KEY"
# Peers remembered as near; bounded, though loopback has few addresses that anybody uses.
PEERS_REMEMBERED = 100

_BEARER = b"bearer "
HOW = "Send `Authorization: Bearer hn_…`; an admin makes a key by `halfnote keys create`."


class Gate:
    """The keys that one process knows, and whether any is asked for."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.off = settings.auth == "off"
        self.used: set[int] = set()
        self.version: str | None = None
        self._clock = clock
        self._keys: dict[bytes, Caller] = {}
        self._near: set[str] = set()
        self._configured = _configured(settings.given_admin_key())

    @property
    def has_admin(self) -> bool:
        """Whether anybody could make keys over HTTP."""
        return self._configured is not None or any(
            one.role is Role.ADMIN and self._fault(one) is None for one in self._keys.values()
        )

    def learn(self, keys: Iterable[ApiKey], version: str | None) -> None:
        """Know these keys from now on, and no others."""
        known = {key.digest: _caller(key) for key in keys}
        if self._configured is not None:
            known[self._configured.digest] = self._configured
        self._keys, self.version = known, version

    def admit(self, scope: AsgiScope, authorization: bytes | None, roles: Roles | None) -> Caller:
        """Return who asks, if that may be done by one of these roles (None: there is no such route).

        Raises Unauthenticated, Forbidden, or NotThisMachine with auth off.
        """
        if self.off:
            self._must_be_near(scope)
            return ANYBODY
        if roles is OPEN:
            return NOBODY if authorization is None else self._known(authorization) or NOBODY
        caller = self.caller(authorization)
        if roles is not None:
            caller.must_be(roles)
        return caller

    def caller(self, authorization: bytes | None) -> Caller:
        """Return whose key this is. Raises Unauthenticated."""
        if authorization is None:
            raise Unauthenticated(f"No key came with this request. {HOW}")
        caller = self._known(authorization)
        if caller is not None:
            return caller
        digest = _digest(authorization)
        ended = None if digest is None else self._keys.get(digest)
        if ended is None:
            raise Unauthenticated(f"This key is not known. {HOW}", invalid=True)
        raise Unauthenticated(f"This key {self._fault(ended)}. {HOW}", invalid=True)

    def _known(self, authorization: bytes) -> Caller | None:
        digest = _digest(authorization)
        caller = None if digest is None else self._keys.get(digest)
        # The dictionary compares as it likes; what decides is compared in constant time.
        if caller is None or digest is None or not hmac.compare_digest(caller.digest, digest):
            return None
        if self._fault(caller) is not None:
            return None
        if caller.key_id is not None:
            self.used.add(caller.key_id)
        return caller

    def _fault(self, caller: Caller) -> str | None:
        if caller.gone is not None:
            return caller.gone
        expired = caller.expires_at < inf and self._clock.time() >= caller.expires_at
        return "has expired" if expired else None

    def _must_be_near(self, scope: AsgiScope) -> None:
        client = scope.get("client")
        # A Unix socket has no peer's address.
        if client is None or client[0] in self._near:
            return
        if not _is_loopback(client[0]):
            raise NotThisMachine(
                "Auth is off here, so only this machine is answered. Set HALFNOTE_AUTH=keys to let others in."
            )
        if len(self._near) < PEERS_REMEMBERED:
            self._near.add(client[0])


def _digest(authorization: bytes) -> bytes | None:
    if authorization[:7].lower() != _BEARER:
        return None
    return sha256(authorization[7:].strip()).digest()


def _caller(key: ApiKey) -> Caller:
    role = Role(key.role)
    person = role in PEOPLE
    return Caller(
        role,
        key_id=key.key_id,
        name=key.name,
        groups=ALL if person else Scope(key.producer_groups),
        topics=ALL if person else Scope(key.topics),
        subscriptions=ALL if person else Scope(key.subscriptions),
        digest=key.digest,
        expires_at=inf if key.expires_at is None else key.expires_at.timestamp(),
        gone=None if key.revoked_at is None else "was revoked",
        rate_per_s=key.rate_per_s,
    )


def _configured(key: str | None) -> Caller | None:
    return None if key is None else Caller(Role.ADMIN, name=CONFIGURED, digest=digest_of(key))


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        # No server gives a name; a test's client does.
        return True
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
