"""People who signed in by OpenID Connect: from the issuer's claims to a caller. Pure, and without the library."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from app.config import Settings
from app.permissions import Caller, Role

# The first role that one of the values gives counts.
BY_RIGHTS = (Role.ADMIN, Role.OPERATOR, Role.VIEWER)
# Characters of a name. An issuer's `sub` has at most 255.
NAME_MAX, SUBJECT_MAX = 200, 255
# Values of a claim that are looked at, and characters of one.
VALUES_MAX, VALUE_MAX = 1000, 500
# Bytes of the values in a session's cookie: browsers drop one of more than 4,096 bytes without a word.
KEPT_BYTES = 1300


@dataclass(frozen=True, slots=True)
class Person:
    """A person as the issuer knows it. `values`: those of the role claim that the settings of sign-in name, cut at
    KEPT_BYTES."""

    issuer: str
    subject: str
    name: str
    values: tuple[str, ...]


def person_of(settings: Settings, issuer: str, claims: Mapping[str, Any]) -> Person:
    """Return the person of a verified ID token. The caller has checked that `sub` is a text."""
    subject = str(claims["sub"])
    values = _kept(settings, values_of(claims, settings.oidc_role_claim))
    return Person(issuer, subject, _name(settings, claims) or subject[:NAME_MAX], values)


def caller_of(settings: Settings, person: Person) -> Caller | None:
    """Return the caller that a person is by the settings of now; None: the person has no role.

    A session keeps the claim's values, not the role, so a changed map counts after the restart that reads it.
    """
    if settings.oidc_issuer is None or person.issuer != settings.oidc_issuer:
        return None
    given = {settings.oidc_roles[value] for value in person.values if value in settings.oidc_roles}
    role = next((one for one in BY_RIGHTS if one in given), None)
    if role is None:
        return None
    return Caller(
        role,
        name=person.name,
        subject=person.subject,
        digest=sha256(f"{person.issuer} {person.subject}".encode()).digest(),
        reads_bodies=_reads_bodies(settings, role, person.values),
    )


def claim_of(claims: Mapping[str, Any], claim: str) -> Any:
    """Return a claim by its name, such as `https://example.com/roles`, or its path with dots; None: it is missing."""
    found = claims.get(claim)
    if found is None:
        found = claims
        for name in claim.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def values_of(claims: Mapping[str, Any], claim: str) -> list[str]:
    """Return the values of a claim: a text, or a list of texts. `claim` is its name, or a path with dots."""
    found = claim_of(claims, claim)
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list):
        return []
    return [value for value in found[:VALUES_MAX] if isinstance(value, str) and len(value) <= VALUE_MAX]


def _kept(settings: Settings, values: Iterable[str]) -> tuple[str, ...]:
    """Return the values that the settings name, as many as a cookie has room for.

    First come one that gives the best role, and one that gives the permission for bodies.
    """
    roles, bodies = settings.oidc_roles, settings.oidc_bodies or ()
    named = [value for value in dict.fromkeys(values) if value in roles or value in bodies]
    by_rights = sorted((value for value in named if value in roles), key=lambda value: BY_RIGHTS.index(roles[value]))
    first = [*by_rights[:1], *[value for value in named if value in bodies][:1]]
    kept, room = [], KEPT_BYTES
    for value in dict.fromkeys([*first, *named]):
        room -= len(value.encode()) + len('"",')
        if room < 0:
            break
        kept.append(value)
    return tuple(kept)


def _reads_bodies(settings: Settings, role: Role, values: Iterable[str]) -> bool:
    if role is Role.ADMIN:
        # An admin can make a key that reads them.
        return True
    if settings.oidc_bodies is None:
        return role is Role.OPERATOR
    return not set(settings.oidc_bodies).isdisjoint(values)


def _name(settings: Settings, claims: Mapping[str, Any]) -> str | None:
    """Return the name of the claim that the settings choose, unless the issuer says that it has not verified it."""
    name = claims.get(settings.oidc_name_claim)
    is_unverified = settings.oidc_name_claim == "email" and claims.get("email_verified") in (False, "false")
    if not isinstance(name, str) or is_unverified:
        return None
    printable = "".join(one for one in name if one.isprintable()).strip()
    return printable[:NAME_MAX] or None
