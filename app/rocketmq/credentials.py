"""Access keys of RocketMQ's clients, and the API keys of Halfnote that stand for them.

Halfnote stores digests of its keys, so it cannot check an HMAC made with one. The gateway has a file of its own with
access keys and secrets; each names the API keys with which the gateway calls Halfnote for that client. So a client
may do what its API keys may do, and the gateway has no rights of its own.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from app.permissions import is_key
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused

SECRET_LEAST = 8
_FIELDS = frozenset({"access_key", "secret_key", "api_key", "producer_key", "subscriber_key"})
# No part can take characters of the next: any caller can send a long header, and it is read in the loop of all.
_authorization = re.compile(
    r"MQv2-HMAC-SHA1 +Credential=([^,/\s]*)(?:[/\s][^,]*)?, *SignedHeaders=x-mq-date-time, *Signature=([0-9A-Fa-f]{40})"
).fullmatch


class CredentialsFault(Exception):
    """The file of credentials cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The API keys with which Halfnote is called for a client; None: without a key."""

    producer: str | None
    subscriber: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """An access key's secret, and its API keys."""

    secret: bytes
    keys: ApiKeys


class Credentials:
    """Decides whose call it is. Without a file every client may call, with the gateway's own key."""

    def __init__(self, known: Mapping[str, Credential] | None, own: ApiKeys) -> None:
        self._known, self._own = known, own

    def keys_of(self, metadata: Mapping[str, str]) -> ApiKeys:
        """Return the API keys of a call. Raises CallRefused (UNAUTHORIZED)."""
        if self._known is None:
            return self._own
        named = _authorization(metadata.get("authorization", "").strip())
        if named is None:
            raise CallRefused(
                Code.UNAUTHORIZED,
                "The call is not signed (MQv2-HMAC-SHA1). Give the client an access key and its secret.",
            )
        # Only this header is signed. The time in it is not checked: some clients send local time and call it UTC.
        return self.keys_of_signed(named[1], metadata.get("x-mq-date-time", "").encode(), bytes.fromhex(named[2]))

    def keys_of_signed(self, access_key: str | None, content: bytes, signature: bytes) -> ApiKeys:
        """Return the API keys of a call whose content is signed (HMAC-SHA1). Raises CallRefused (UNAUTHORIZED)."""
        if self._known is None:
            return self._own
        if not access_key:
            raise CallRefused(
                Code.UNAUTHORIZED, "The call is not signed. Give the client an access key and its secret."
            )
        found = self._known.get(access_key)
        secret = b"\0" if found is None else found.secret
        signed = hmac.new(secret, content, "sha1").digest()
        if not hmac.compare_digest(signed, signature) or found is None:
            raise CallRefused(Code.UNAUTHORIZED, "The access key is unknown, or the signature is not of its secret.")
        return found.keys


def read_credentials(file: Path) -> dict[str, Credential]:
    """Return what a file of credentials has, by access key. Raises CredentialsFault."""
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise CredentialsFault(f"{file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, yaml.YAMLError) as error:
        # The error's own text quotes the file, and so its secrets.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise CredentialsFault(f"{file} is no YAML{where}.") from None
    entries = content.get("credentials") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise CredentialsFault(f"{file} has no list `credentials`.")
    known: dict[str, Credential] = {}
    for number, entry in enumerate(entries):
        access_key, credential = _credential(entry, f"{file}: credentials[{number}]")
        if access_key in known:
            raise CredentialsFault(f"{file}: credentials[{number}]: the access key was in an earlier entry.")
        known[access_key] = credential
    return known


def _credential(entry: Any, where: str) -> tuple[str, Credential]:
    if not isinstance(entry, dict) or not _FIELDS.issuperset(entry):
        raise CredentialsFault(f"{where} has other fields than {', '.join(sorted(_FIELDS))}.")
    for name, value in entry.items():
        if not isinstance(value, str) or not value.strip():
            raise CredentialsFault(f"{where}: `{name}` is not a text.")
        if name.endswith("_key") and name not in ("access_key", "secret_key") and not is_key(value):
            raise CredentialsFault(f"{where}: `{name}` is no API key of Halfnote (hn_…).")
    access_key, secret = entry.get("access_key", ""), entry.get("secret_key", "")
    if not re.fullmatch(r"[^,/\s]+", access_key):
        raise CredentialsFault(f"{where}: `access_key` is missing, or has a blank, a comma or a slash.")
    if len(secret) < SECRET_LEAST:
        raise CredentialsFault(f"{where}: `secret_key` has less than {SECRET_LEAST} characters.")
    both = entry.get("api_key")
    keys = ApiKeys(entry.get("producer_key", both), entry.get("subscriber_key", both))
    if keys.producer is None and keys.subscriber is None:
        raise CredentialsFault(f"{where} has no `api_key`, `producer_key` or `subscriber_key`.")
    return access_key, Credential(secret.encode(), keys)
