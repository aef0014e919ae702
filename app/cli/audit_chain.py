"""The chain of the audit, computed again from the text of its rows; see `GET /audit/chain`."""

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from app.cli.errors import WRONG_USAGE, Refusal

# The first digits of a digest, which are enough to see that two differ.
SHOWN = 12
# A row is committed seconds after its `at`, and this machine's clock is another one than that of certificates.
AGES_DIFFER = timedelta(days=1)
# As the service's setting has it.
KEPT_MOST_S = 36_500 * 86_400
_KNOWN = re.compile(r"([0-9]{1,18}):([0-9a-f]{64}|)")


class Witness(NamedTuple):
    """What was known of a place of the chain. `source` names who knew it.

    `at`: when it was the last one, if that is known; `kept_s`: how long rows were kept then, in seconds.
    """

    source: str
    place: int
    digest: str
    at: datetime | None = None
    kept_s: int | None = None


def witness_of_certificate(file: Path) -> Witness:
    """Return what a copy of a day's certificate says of the audit. Its signature is not verified. Raises Refusal."""
    try:
        body = json.loads(file.read_bytes())["certificate"]
        audit, seen_at = body["audit"], datetime.fromisoformat(body["seen_at"]).astimezone(UTC)
        kept_s = audit.get("kept_s")
        if kept_s is not None and not 0 < int(kept_s) <= KEPT_MOST_S:
            raise ValueError(kept_s)
        return Witness(
            str(file), int(audit["place"]), str(audit["digest"]), seen_at, None if kept_s is None else int(kept_s)
        )
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}.", code=WRONG_USAGE) from None
    except (ValueError, KeyError, TypeError, OverflowError):
        raise Refusal(
            f"{file} is no certificate that names a row of the audit. `halfnote certificate show` prints one.",
            code=WRONG_USAGE,
        ) from None


def witness_of_text(text: str) -> Witness:
    """Parse PLACE:DIGEST. Raises Refusal."""
    found = _KNOWN.fullmatch(text)
    if found is None:
        raise Refusal(
            f"`{text}` is not PLACE:DIGEST. `halfnote audit verify` prints both in its last line.", code=WRONG_USAGE
        )
    return Witness("--known", int(found[1]), found[2])


@dataclass
class Chain:
    """The rows so far. `digest`: of the last one, at `place`. `before`: the last row that was removed by age."""

    witnesses: list[Witness]
    rows: int = 0
    place: int = 0
    digest: str = ""
    before: int = 0
    found: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    _digests: dict[int, str] = field(default_factory=dict)
    _began: bool = False

    def add(self, page: dict[str, Any]) -> None:
        """Compute the digests of the next rows."""
        if not self._began:
            begins = page["begins_after"] or {"place": 0, "digest": ""}
            self.place, self.digest, self._began = begins["place"], begins["digest"], True
            self.before = self.place
            self._note()
        for row in page["items"]:
            if row["place"] != self.place + 1:
                self.found.append(f"Rows {self.place + 1} to {row['place'] - 1} are missing.")
            elif _digest(row["place"], self.digest, row["content"]) != row["digest"]:
                self.found.append(f"Row {row['place']} was changed: {row['content'][:-1]}")
            self.place, self.digest = row["place"], row["digest"]
            self.rows += 1
            self._note()

    def _note(self) -> None:
        if any(one.place == self.place for one in self.witnesses):
            self._digests[self.place] = self.digest

    def faults(self, last: dict[str, Any]) -> list[str]:
        """Return as texts what is wrong, and note which witnesses were not compared. `last`: the last page."""
        found, head = list(self.found), last["head"]
        if head is None:
            found.append("The table audit_chain has no row.")
        elif head["place"] > self.place:
            found.append(f"Rows {self.place + 1} to {head['place']} are missing: they were the last ones.")
        elif head["place"] == self.place and head["digest"] != self.digest:
            found.append(f"Row {self.place} is not the last one that audit_chain names.")
        if last["unchained"]:
            found.append(f"{last['unchained']} rows have no place in the chain.")
        found += [text for one in self.witnesses if (text := self._contradicts(one)) is not None]
        # A service of the version before does not say it.
        kept_s = last.get("kept_s")
        return found + ([] if kept_s is None else self._removed_early(timedelta(seconds=kept_s)))

    def _removed_early(self, kept: timedelta) -> list[str]:
        """Return as a text that rows are gone which are younger than rows are kept: later than a young witness.

        The setting may have been raised. What a witness says of it holds until the next one: rows that were past their
        age by then may be gone.
        """
        dated = sorted(((one.at, one) for one in self.witnesses if one.at is not None), key=lambda pair: pair[0])
        now = datetime.now(UTC)
        until = [*(at for at, _ in dated), now][1:]
        ages = [now - kept]
        ages += [
            end - timedelta(seconds=one.kept_s)
            for end, (_, one) in zip(until, dated, strict=True)
            if one.kept_s is not None
        ]
        young = [one for at, one in dated if at > max(ages) + AGES_DIFFER and one.place < self.before]
        if not young:
            return []
        first = min(young, key=lambda one: one.place)
        return [
            f"Rows {first.place + 1} to {self.before} are missing, and were not past their age:\n"
            f"  {first.source} is older than they are."
        ]

    def _contradicts(self, one: Witness) -> str | None:
        if one.place == 0:
            return None
        if one.place < self.before:
            self.not_compared.append(
                f"{one.source}: row {one.place} was not compared: rows up to {self.before} are gone."
            )
            return None
        found = self._digests.get(one.place)
        if found == one.digest:
            return None
        now = "is missing now" if found is None else f"has {found[:SHOWN]}… now"
        return f"{one.source}: row {one.place} had the digest {one.digest[:SHOWN]}…, and {now}."


def _digest(place: int, before: str, content: str) -> str:
    return sha256(f'[{place}, "{before}", {content}'.encode()).hexdigest()
