"""What a person who rotates a secret saw of it, so that a repeated request makes no further secret."""

from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

import msgspec

from app.errors import Invalid


@dataclass(frozen=True, slots=True)
class SecretState:
    """The stored secrets of one receiver. `former_signs_until` None: no former one signs, or they cannot be read."""

    version: str
    former_signs_until: datetime | None


def version_of(stored: Any) -> str:
    """Return what stands for secrets as they are stored. Each rotation and each new seal makes another one."""
    return sha256(msgspec.json.encode(stored)).hexdigest()[:32]


def refuse_if_changed(stored: Any, seen: str | None) -> None:
    """Raise Invalid unless secrets are stored as they were seen. `seen` None: no one looked."""
    if seen is not None and version_of(stored) != seen:
        raise Invalid(
            "The secret has changed since this page was shown, so nothing was done. Send the form again to rotate it.",
            field="seen",
        )
