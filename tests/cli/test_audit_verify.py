"""`halfnote audit verify`: the chain of the audit is computed again from what the API lists."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from app.cli.audit_chain import Chain, Witness, witness_of_certificate, witness_of_text
from app.cli.errors import Refusal
from tests.support.cli_runs import Run, run

__all__ = ["run"]

ACT = """
insert into audit (at, actor, key_id, role, what, target, detail)
values (now() - interval '1 day', %s, 7, 'operator', 'transaction.verdict', 'ä "1"\n',
  '{"n": 1.50, "b": [null, "\\u0001"]}')
"""
CUT = (
    "delete from audit where place >= 8",
    "update audit_chain set (place, digest) = (select place, digest from audit where place = 7)",
)
FORGOTTEN = """
with gone as (delete from audit where place <= 4 returning place, digest)
update audit_chain set (forgotten_place, forgotten_digest) = (select place, digest from gone where place = 4)
"""
# Changes of a chain of nine rows, and what is said of it.
DAMAGE: dict[tuple[str, ...], list[str]] = {
    ("update audit set actor = 'bob' where place = 5",): ["Row 5 was changed"],
    ("update audit set detail = '{}' where place = 5",): ["Row 5 was changed"],
    ("update audit set at = at + interval '1 us' where place = 5",): ["Row 5 was changed"],
    ("update audit set digest = sha256('x') where place = 5",): ["Row 5 was changed", "Row 6 was changed"],
    ("update audit set digest = sha256('x') where place = 9",): ["Row 9 was changed", "Row 9 is not the last one"],
    ("delete from audit where place = 5",): ["Rows 5 to 5 are missing."],
    ("delete from audit where place < 4",): ["Rows 1 to 3 are missing."],
    ("delete from audit where place > 7",): ["Rows 8 to 9 are missing: they were the last ones."],
    ("delete from audit_chain",): ["The table audit_chain has no row."],
    ("update audit set place = null where place = 9", "update audit_chain set place = 8"): [
        "Row 8 is not the last one",
        "1 rows have no place",
    ],
    CUT: ["--known: row 8 had the digest ", "--known: row 9 had the digest "],
    (FORGOTTEN,): [],
}


@pytest.fixture
def chained(dsn: str) -> str:
    """A database with nine acts."""
    for number in range(9):
        with psycopg.connect(dsn) as db:
            db.execute(ACT, [f"ann-{number}" if number else None])
    return dsn


async def verified(client: httpx.AsyncClient, witnesses: list[Witness]) -> Chain:
    """Read the chain in several pages."""
    chain, cursor = Chain(witnesses), None
    while True:
        answer = await client.get("/audit/chain", params={"limit": 4} | ({"cursor": cursor} if cursor else {}))
        chain.add(answer.json())
        if (cursor := answer.json()["next_cursor"]) is None:
            chain.found = chain.faults(answer.json())
            return chain


def digests(dsn: str) -> list[Witness]:
    """All digests, as they are known before anything is changed."""
    with psycopg.connect(dsn) as db:
        known: Any = db.execute("select place, encode(digest, 'hex') from audit order by 1").fetchall()
    return [Witness("--known", place, digest) for place, digest in known]


async def test_a_chain_is_intact(client: httpx.AsyncClient, chained: str) -> None:
    known = digests(chained)
    chain = await verified(client, known)
    assert (chain.found, chain.rows, chain.place, chain.digest) == ([], 9, 9, known[-1].digest)


async def test_an_audit_without_rows_is_intact(client: httpx.AsyncClient, dsn: str) -> None:
    chain = await verified(client, [Witness("--known", 0, "")])
    assert (chain.found, chain.rows, chain.place, chain.digest) == ([], 0, 0, "")


@pytest.mark.parametrize("statements", DAMAGE, ids=lambda statements: statements[0][:50].strip())
async def test_each_change_is_named(client: httpx.AsyncClient, chained: str, statements: tuple[str, ...]) -> None:
    known = digests(chained)
    with psycopg.connect(chained) as db:
        db.execute("set session_replication_role = replica")
        for one in statements:
            made: Any = one
            assert db.execute(made).rowcount >= 1
    # Only the fault of the end needs to be known from elsewhere.
    chain = await verified(client, known if statements in (CUT, (FORGOTTEN,)) else [])
    assert len(chain.found) == len(DAMAGE[statements])
    assert all(said.startswith(begins) for said, begins in zip(chain.found, DAMAGE[statements], strict=True))


def known_since(known: list[Witness], *places_and_days: tuple[int, float], kept_s: int | None = None) -> list[Witness]:
    """What certificates of so many days ago say of these places."""
    now = datetime.now(UTC)
    return [
        known[place - 1]._replace(source=f"{place}.json", at=now - timedelta(days=days), kept_s=kept_s)
        for place, days in places_and_days
    ]


async def test_rows_that_are_gone_before_their_age_are_named(client: httpx.AsyncClient, chained: str) -> None:
    """A person removed the first four, and moved the beginning of the chain. Certificates show it."""
    known = digests(chained)
    with psycopg.connect(chained) as db:
        db.execute("set session_replication_role = replica")
        db.execute(FORGOTTEN)
    chain = await verified(client, known_since(known, (3, 10), (2, 20), (1, 398), (4, 1), (9, 1)))
    assert chain.found == ["Rows 2 to 4 are missing, and were not past their age:\n  1.json is older than they are."]
    assert [one.split(" was ")[0] for one in chain.not_compared] == [
        f"{place}.json: row {place}" for place in (3, 2, 1)
    ]


async def test_rows_past_their_age_are_not_compared(client: httpx.AsyncClient, chained: str) -> None:
    known = digests(chained)
    with psycopg.connect(chained) as db:
        db.execute("set session_replication_role = replica")
        db.execute(FORGOTTEN)
    # The last one says what was removed: its digest is still known.
    chain = await verified(client, known_since(known, (3, 400), (4, 1)) + known[:1])
    assert chain.found == []
    assert chain.not_compared == [
        "3.json: row 3 was not compared: rows up to 4 are gone.",
        "--known: row 1 was not compared: rows up to 4 are gone.",
    ]
    # By a service of the version before.
    page = (await client.get("/audit/chain")).json()
    older = Chain(known_since(known, (1, 20)))
    older.add(page)
    assert older.faults({name: value for name, value in page.items() if name != "kept_s"}) == []
    # Rows were kept for a shorter time from the older certificate on, and from the newer one.
    assert (await verified(client, known_since(known, (1, 20), (5, 10), kept_s=9 * 86_400))).found == []
    assert len((await verified(client, known_since(known, (1, 20), (5, 10), kept_s=25 * 86_400))).found) == 1


def test_the_command(run: Run, tmp_path: Path) -> None:
    assert run("subscriptions", "put", "audited", "--topic", "order", "--to", "http://127.0.0.1:9/in").code == 0
    shown = run("audit", "verify")
    assert shown.code == 0, shown.out
    last = shown.out.split()[-1]
    assert run("audit", "verify", "--known", last, "--json").json["intact"] is True
    place, _, digest = last.partition(":")
    file = tmp_path / "certificate.json"
    said = {"seen_at": "2026-11-20T08:00:00+00:00", "audit": {"place": int(place), "digest": digest}}
    file.write_text(json.dumps({"certificate": said}))
    assert run("audit", "verify", "--certificate", file).code == 0
    wrong = run("audit", "verify", "--known", f"{place}:{'0' * 64}")
    assert (wrong.code, f"row {place} had the digest 0000" in wrong.out) == (3, True)
    later = run("audit", "verify", "--known", f"{int(place) + 100}:{digest}")
    assert (later.code, "is missing now" in later.out) == (3, True)
    # The list is as before.
    assert "audited" in run("audit", "--target", "audited", "--json").out


@pytest.mark.parametrize("text", ["", "7", "7:xyz", "-1:00", f"x:{'0' * 64}", f"7:{'0' * 63}"])
def test_what_is_no_place_and_digest_is_wrong_usage(text: str) -> None:
    with pytest.raises(Refusal, match="PLACE:DIGEST") as refused:
        witness_of_text(text)
    assert refused.value.code == 2


def test_a_file_that_names_no_row_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="cannot be read") as refused:
        witness_of_certificate(tmp_path / "none.json")
    assert refused.value.code == 2
    for content in (
        "",
        "{}",
        '{"certificate": {"audit": {"place": 7, "digest": "00"}, "seen_at": "today"}}',
        '{"certificate": {"day": "2026-11-20"}}',
        "[1]",
    ):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(Refusal, match="is no certificate that names a row of the audit"):
            witness_of_certificate(tmp_path / "other.json")
