"""Certificates of final days: fetch one, list them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlencode

import httpx

from halfnote.async_driver import AsyncDriver
from halfnote.exchange import REFUSED_WITHIN_S, Exchange, Request, asked
from halfnote.http import headers_of
from halfnote.sync_driver import SyncDriver

# The most entries of a page that the service answers.
_PAGE = 100


@dataclass(frozen=True)
class Certificate:
    """The certificate of a day. `text` is the document byte for byte, for `halfnote certificate verify`.

    `certificate` has the fields that docs/certificate.md lists; `signature` is None if it is unsigned. Nothing is
    verified here.
    """

    text: str
    certificate: Mapping[str, Any]
    signature: Mapping[str, str] | None

    @property
    def digest(self) -> str:
        """The SHA-256 of the document in hex, which the next certificate contains."""
        return sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class CertificateEntry:
    """A certificate in a list. `public_key`: the key that it names, None if it is unsigned.

    `chain`: `ok` if it names the certificate before it, `first` if there is none, `broken` otherwise, by the service.
    """

    day: date
    sequence: int
    digest: str
    public_key: str | None
    chain: Literal["first", "ok", "broken"]


class Certificates:
    """Reads the certificates of a service. `close` it, or `async with`.

    `api_key`: of the role `viewer`, which has the least rights, `operator` or `admin`. `attempt_s` bounds one request,
    and `within_s` all attempts.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        attempt_s: float = 5.0,
        within_s: float = 15.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._attempt_s, self._within_s = attempt_s, within_s
        self._driver = AsyncDriver(url, headers_of(api_key), transport)

    async def fetch(self, day: date) -> Certificate:
        """Return a day's certificate. Raises Refused (`day-not-certified` if it has none) or Unconfirmed."""
        return await self._driver.run(_fetched(day, self._attempt_s, self._within_s))

    async def entries(self, since: date | None = None) -> list[CertificateEntry]:
        """Return all certificates, or those of the days since one, the last one written first.

        Raises Refused or Unconfirmed.
        """
        return await self._driver.run(_listed(since, self._attempt_s, self._within_s))

    async def close(self) -> None:
        """Close the connections."""
        await self._driver.close(0)

    async def __aenter__(self) -> "Certificates":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


class SyncCertificates:
    """Certificates without an event loop. All threads may share one."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        attempt_s: float = 5.0,
        within_s: float = 15.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._attempt_s, self._within_s = attempt_s, within_s
        self._driver = SyncDriver(url, headers_of(api_key), transport)

    def fetch(self, day: date) -> Certificate:
        """Return a day's certificate. Raises Refused (`day-not-certified` if it has none) or Unconfirmed."""
        return self._driver.run(_fetched(day, self._attempt_s, self._within_s))

    def entries(self, since: date | None = None) -> list[CertificateEntry]:
        """Return all certificates, or those of the days since one, the last one written first.

        Raises Refused or Unconfirmed.
        """
        return self._driver.run(_listed(since, self._attempt_s, self._within_s))

    def close(self) -> None:
        """Close the connections."""
        self._driver.close(0)

    def __enter__(self) -> "SyncCertificates":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _fetched(day: date, attempt_s: float, within_s: float) -> Exchange[Certificate]:
    request = Request("GET", f"/reconciliation/{day.isoformat()}/certificate", b"", attempt_s)
    what = f"the certificate of {day}"
    answer = yield from asked(what, request, within_s=within_s, refused_within_s=REFUSED_WITHIN_S)
    # The canonical form: sorted keys and no blanks.
    text = json.dumps(answer.content, sort_keys=True, separators=(",", ":")) + "\n"
    return Certificate(text, answer.content["certificate"], answer.content["signature"])


def _listed(since: date | None, attempt_s: float, within_s: float) -> Exchange[list[CertificateEntry]]:
    query: dict[str, Any] = {"limit": _PAGE}
    if since is not None:
        query["since"] = since.isoformat()
    found: list[CertificateEntry] = []
    while True:
        request = Request("GET", f"/reconciliation/certificates?{urlencode(query)}", b"", attempt_s)
        answer = yield from asked(
            "the list of certificates", request, within_s=within_s, refused_within_s=REFUSED_WITHIN_S
        )
        for one in answer.content["items"]:
            entry = CertificateEntry(
                date.fromisoformat(one["day"]), one["sequence"], one["digest"], one["public_key"], one["chain"]
            )
            found.append(entry)
        if answer.content["next_cursor"] is None:
            return found
        query["before"] = answer.content["next_cursor"]
