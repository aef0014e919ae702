"""Answers of the routes of certificates."""

from datetime import date
from typing import Any, Literal

from pydantic import Field

from app.schemas.reconciliation import DAY
from app.schemas.transactions import Shown


class CertificateShown(Shown):
    """A day's certificate. docs/certificate.md has its fields."""

    certificate: dict[str, Any] = Field(
        description="`day`, `sequence`, `previous`, `counts`, `tables` (the digest tree), `findings`, `root`",
        examples=[{"day": DAY, "sequence": 30, "root": "5e1f"}],
    )
    signature: dict[str, str] | None = Field(
        description="`algorithm`, `public_key` and `signature`, in hex; null: the certificate is unsigned",
        examples=[{"algorithm": "ed25519", "public_key": "d75a…", "signature": "e556…"}],
    )


class CertificateEntry(Shown):
    """A certificate in a list."""

    day: date = Field(examples=[DAY])
    sequence: int = Field(description="its number in the chain", examples=[30])
    digest: str = Field(description="the SHA-256 of its bytes, in hex", examples=["9f86…"])
    public_key: str | None = Field(
        description="the key that it says it is signed by, in hex; null: it is unsigned", examples=["d75a…"]
    )
    chain: Literal["first", "ok", "broken"] = Field(
        description="`ok`: it names the certificate before it, by day and digest; `first`: there is none before it; "
        "`broken`: it names another one, or cannot be read",
        examples=["ok"],
    )


class CertificatePage(Shown):
    """A page of certificates, the last one written first."""

    items: list[CertificateEntry]
    next_cursor: int | None = Field(description="send it as `before` for the next page; null: this was the last")
