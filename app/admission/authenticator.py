"""Authenticates requests by API key, without a query for each request.

Every process holds the SHA-256 of all keys. `app/loops/live_settings.py` reads the database once a second for changes.
So every replica that reaches the database accepts a new key and refuses a revoked one within KNOWN_WITHIN_S. Expiry is
checked for each request.
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address
from math import inf

from starlette.types import Scope

from app.admission.route_roles import OPEN, READERS, Roles
from app.clock import Clock
from app.config import Settings
from app.errors import NotThisMachine, Unauthenticated
from app.permissions import ALL, ANONYMOUS, AUTH_OFF, Caller, KeyScope, Role, digest_of
from app.store.admin.api_keys import ApiKey

KNOWN_WITHIN_S = 2
CONFIGURED = "HALFNOTE_ADMIN_KEY"
# Loopback peers remembered. Bounded, although few loopback addresses are in use.
PEERS_REMEMBERED = 100

_BEARER = b"bearer "
HOW = "Send `Authorization: Bearer hn_…`; an admin makes a key by `halfnote keys create`."


class Authenticator:
    """The keys that one process holds. With auth off no key is required."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.off = settings.auth == "off"
        self.used: set[int] = set()
        self.version: str | None = None
        self._clock = clock
        self._keys: dict[bytes, Caller] = {}
        self._loopback_peers: set[str] = set()
        self._configured = _configured(settings.given_admin_key())

    @property
    def has_admin(self) -> bool:
        """Whether a valid admin key exists, so that keys can be made over HTTP."""
        return self._configured is not None or any(
            one.role is Role.ADMIN and self._fault(one) is None for one in self._keys.values()
        )

    def is_configured(self, key: str) -> bool:
        """Return whether a key is the admin key of this process's settings."""
        return self._configured is not None and digest_of(key) == self._configured.digest

    def learn(self, keys: Iterable[ApiKey], version: str | None) -> None:
        """Replace the keys of this process by these."""
        # A later version may have made keys of roles that this one does not know.
        known = {key.digest: _caller(key) for key in keys if key.role in OPEN}
        if self._configured is not None:
            known[self._configured.digest] = self._configured
        self._keys, self.version = known, version

    def admit(self, scope: Scope, authorization: bytes | None, roles: Roles | None) -> Caller:
        """Return the caller, if one of these roles may call the route (None: no route matches).

        Raises Unauthenticated, Forbidden, or NotThisMachine with auth off.
        """
        if self.off:
            self._require_loopback(scope)
            return AUTH_OFF
        if roles is OPEN:
            return ANONYMOUS if authorization is None else self._known(authorization) or ANONYMOUS
        caller = self.caller(authorization)
        if roles is not None:
            caller.must_be(roles)
        return caller

    def caller(self, authorization: bytes | None) -> Caller:
        """Return the key's caller. Raises Unauthenticated."""
        if authorization is None:
            raise Unauthenticated(f"No key came with this request. {HOW}")
        caller = self._known(authorization)
        if caller is not None:
            return caller
        raise self._refusal(_digest(authorization))

    def still_valid(self, caller: Caller, roles: Roles) -> Caller:
        """Return the caller of a request that has waited, as its key is now. Raises Unauthenticated and Forbidden."""
        if caller.role is None:
            return caller
        now = self.holder(caller.digest)
        if now is None:
            raise self._refusal(caller.digest)
        now.must_be(roles)
        return now

    def _refusal(self, digest: bytes | None) -> Unauthenticated:
        ended = None if digest is None else self._keys.get(digest)
        fault = "is not known" if ended is None else self._fault(ended)
        return Unauthenticated(f"This key {fault}. {HOW}", invalid=True)

    def holder(self, digest: bytes) -> Caller | None:
        """Return the caller whose valid key has this digest, as of a session of the console; None if there is none."""
        caller = self._keys.get(digest)
        if caller is None or self._fault(caller) is not None:
            return None
        if caller.key_id is not None:
            self.used.add(caller.key_id)
        return caller

    def _known(self, authorization: bytes) -> Caller | None:
        digest = _digest(authorization)
        caller = None if digest is None else self._keys.get(digest)
        # Dict lookup is not constant-time; `compare_digest` decides.
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

    def _require_loopback(self, scope: Scope) -> None:
        client = scope.get("client")
        # A Unix socket has no peer address.
        if client is None or client[0] in self._loopback_peers:
            return
        if not _is_loopback(client[0]):
            raise NotThisMachine(
                "Auth is off, so only requests from this machine are answered. Set HALFNOTE_AUTH=keys to answer others."
            )
        if len(self._loopback_peers) < PEERS_REMEMBERED:
            self._loopback_peers.add(client[0])


def _digest(authorization: bytes) -> bytes | None:
    if authorization[:7].lower() != _BEARER:
        return None
    return sha256(authorization[7:].strip()).digest()


def _caller(key: ApiKey) -> Caller:
    role = Role(key.role)
    person = role in READERS
    return Caller(
        role,
        key_id=key.key_id,
        name=key.name,
        groups=ALL if person else KeyScope(key.producer_groups),
        topics=ALL if person else KeyScope(key.topics),
        subscriptions=ALL if person else KeyScope(key.subscriptions),
        digest=key.digest,
        expires_at=inf if key.expires_at is None else key.expires_at.timestamp(),
        gone=None if key.revoked_at is None else "was revoked",
        rate_per_s=key.rate_per_s,
        reads_bodies=role is not Role.VIEWER if key.bodies is None else key.bodies,
    )


def _configured(key: str | None) -> Caller | None:
    return None if key is None else Caller(Role.ADMIN, name=CONFIGURED, digest=digest_of(key))


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        # A test client sends a name; a real server always has an address.
        return True
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
