"""The digest of a stored half, computed again: as the service computes it, and another one after any change."""

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from app.clock import Clock
from app.config import Settings
from app.coordinator.half_content import half_of
from app.coordinator.wire import HalfRequest, PlainRequest
from app.store.coordinator.halves import Half
from spark.engine.progress import Progress
from spark.frames import Frames
from spark.half_digest import StoredMessage, digest_of, is_altered
from spark.postgres import copy
from spark.postgres.connections import open_snapshot
from spark.sources import half_digests, scan
from spark.sources.frames import frames_from_parquet, frames_from_postgres
from spark.sources.half_digests import UNCONFIRMED
from tests.conftest import migrated_template
from tests.spark.days import Connection, days_ago, fill_day, rows
from tests.support import postgres

SETTINGS = Settings(_env_file=None, database_url="")  # type: ignore[call-arg]
# The last is a message as small as one can be.
MESSAGES: tuple[dict[str, Any], ...] = (
    {"topic": "order", "key": 'k"\\ü', "tag": "t", "body": {"a": [1]}, "deliver_after_s": 5},
    {"topic": "order", "headers": {"region": "eu", "b": 'x "y", z', "Trace": "ü/"}, "body_base64": "AP8="},
    {"topic": "a b", "deliver_after_s": 0.00001, "body": None, "content_type": "application/x+json"},
    {"topic": "o", "body": 1, "headers": {}},
)
# jsonb changes the order of keys and the form of numbers.
CONTEXTS = (
    '{"order": 1030}',
    '{"trace":"x","id":{"b":[1,2.50,{"c":null}],"a":true},"äö":"\\u00e9\\u2028\\ud83d\\ude00/\\u007f"}',
    '"a text, with: signs"',
    "null",
    "[]",
    "[1e16,1E2,-0.0,0.0,1e-7,5e-324,12345678901234567890,123456789012345678901234567890,-0]",
    "[1.7976931348623157e308,10000000000000000]",
)
CHECKS = ({}, {"max_checks": 3.0, "immunity_s": 60, "include_body": True}, {"on_exhausted": "park", "interval_s": 5})

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Surrogates are no characters, and the service refuses NUL.
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcdé", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def db() -> Iterator[Connection]:
    """A connection for values of jsonb."""
    url = postgres.create_database(migrated_template())
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection
    postgres.drop_database(url)


def stored(db: Connection, half: Half) -> list[StoredMessage]:
    """Return the rows of a half as the proof reads them."""

    def kept(text: str | None) -> str | None:
        row = db.execute("select %s::jsonb::text", [text]).fetchone()
        assert row is not None
        return row[0]  # type: ignore[no-any-return]

    return [
        StoredMessage(
            str(half.transaction_id),
            position,
            half.producer_group,
            message.topic,
            message.key,
            message.tag,
            kept(message.headers),
            message.content_type,
            message.body_digest,
            message.deliver_after_s,
            kept(half.context) if position == 0 else None,
            kept(half.policy) if position == 0 else None,
            half.digest if position == 0 else None,
        )
        for position, message in enumerate(half.messages)
    ]


def posted(kind: type[HalfRequest | PlainRequest], fields: str) -> Half:
    """Return the half that the service stores for the JSON of a request, without its first brace."""
    text = f'{{"producer_group":"shöp",{fields}'
    return half_of(msgspec.json.decode(text, type=kind), SETTINGS, Clock())


def request(messages: Any, context: str | None = None, check: Any = None) -> Half:
    """Return the half that the service stores for a request to /half."""
    fields = f'"messages":{json.dumps(messages)}'
    fields += "" if context is None else f',"context":{context}'
    fields += "" if check is None else f',"check":{json.dumps(check)}'
    return posted(HalfRequest, fields + "}")


@pytest.mark.parametrize("message", MESSAGES)
def test_a_half_is_what_was_posted(db: Connection, message: dict[str, Any]) -> None:
    assert not is_altered(stored(db, request([message])))
    assert not is_altered(stored(db, request([message, *MESSAGES], CONTEXTS[1], CHECKS[1])))
    assert not is_altered(stored(db, posted(PlainRequest, f'"messages":{json.dumps([message, *MESSAGES])}}}')))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_context_and_a_policy_are_compared_by_value(db: Connection, context: str, check: dict[str, Any]) -> None:
    rows = stored(db, request(MESSAGES[:1], context, check))
    assert not is_altered(rows)
    assert is_altered([rows[0]._replace(context='{"order": 1031}')])
    assert is_altered([rows[0]._replace(policy='{"max_checks": 4}')])


@given(JSON)
def test_any_context_is_known_again(db: Connection, context: Any) -> None:
    assert not is_altered(stored(db, request(MESSAGES[:1], json.dumps(context))))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("producer_group", "shop"),
        ("topic", "orders"),
        ("key", None),
        ("tag", "T"),
        ("headers", '{"region": "us"}'),
        ("headers", None),
        ("content_type", "text/plain"),
        ("body_digest", bytes(32)),
        ("deliver_after_s", 6.0),
        ("deliver_after_s", None),
        ("position", 1),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_each_changed_column_shows(db: Connection, name: str, value: Any, place: int) -> None:
    message = {**MESSAGES[0], "headers": {"region": "eu"}}
    rows = stored(db, request([message, message]))
    assert not is_altered(rows)
    assert rows[place] != rows[place]._replace(**{name: value}) or (name, place) == ("position", 1)
    rows[place] = rows[place]._replace(**{name: value if name != "position" else place + 1})
    assert is_altered(rows)


def test_a_message_removed_added_or_swapped_shows_and_so_does_a_lost_digest(db: Connection) -> None:
    rows = stored(db, request(MESSAGES))
    assert is_altered(rows[1:])
    assert is_altered(rows[:-1])
    assert is_altered([*rows, rows[-1]._replace(position=len(rows))])
    assert is_altered([rows[0], rows[2]._replace(position=1), rows[1]._replace(position=2), rows[3]])
    assert is_altered([rows[0]._replace(digest=None), *rows[1:]])


def test_an_operational_message_has_the_digest_of_its_body(db: Connection) -> None:
    half = request(MESSAGES[3:])
    [row] = stored(db, half)
    own = row._replace(topic="halfnote.delivery.dead", digest=row.body_digest)
    assert not is_altered([own])
    assert is_altered([own._replace(body_digest=bytes(32))])
    # Only on reserved topics.
    assert is_altered([own._replace(topic="order")])


def test_more_ambiguous_numbers_than_are_tried_end(db: Connection) -> None:
    assert is_altered([stored(db, request(MESSAGES[3:], "[0.0]"))[0]._replace(context=json.dumps([0.0] * 5000))])


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
# The body of each digest that a test stores.
BODIES = {sha256(body).digest(): body for body in (b"", b"1", b"2")}
NOTHING, ONE, TWO = BODIES
ID = "01999999-0000-7000-8000-000000000000"
USUAL = StoredMessage(ID, 0, "shop", "order", "k", None, None, "application/json", ONE, None, None, None, None)
TYPES = {"position": "smallint", "body_digest": "bytea", "deliver_after_s": "float8", "digest": "bytea"}
TYPES |= dict.fromkeys(("headers", "context", "policy"), "jsonb") | {"transaction_id": "uuid", "body": "bytea"}
TYPES |= {"reissued_from": "uuid"}
COLUMNS = (*StoredMessage._fields, "body", "reissued_from")


def unconfirmed(db: Connection, messages: Sequence[StoredMessage], **other: Any) -> set[int]:
    """Return the positions that the proof's statement leaves to this process; `other` replaces columns of each row."""
    rows = [row._asdict() | {"body": BODIES[row.body_digest], "reissued_from": None} | other for row in messages]
    selects = ", ".join("({})".format(", ".join(f"%s::{TYPES.get(name, 'text')}" for name in COLUMNS)) for _ in rows)
    half = f"(select * from (values {selects}) rows ({', '.join(COLUMNS)}))"
    statement = UNCONFIRMED.format(half=half, low=UUID(int=0), high=UUID(int=2**128 - 1))
    # Postgres may read rows in any order.
    found = db.execute(statement, [row[name] for row in reversed(rows) for name in COLUMNS]).fetchall()
    return {row[1] for row in found}


def is_confirmed(db: Connection, *messages: StoredMessage, **other: Any) -> bool:
    """Return whether Postgres confirms a transaction by itself."""
    return not unconfirmed(db, messages, **other)


def with_digest(row: StoredMessage, *, plain: bool = False) -> StoredMessage:
    return row._replace(digest=digest_of([row], plain=plain))


def with_body(body: bytes) -> bytes:
    """Return the digest of a body."""
    BODIES[digest := sha256(body).digest()] = body
    return digest


@given(TEXT, TEXT, st.none() | TEXT, st.none() | TEXT, TEXT, st.binary(max_size=3), st.booleans())
def test_a_usual_transaction_is_confirmed_by_the_same_text(
    db: Connection,
    group: str,
    topic: str,
    key: str | None,
    tag: str | None,
    content_type: str,
    body: bytes,
    plain: bool,
) -> None:
    row = with_digest(
        USUAL._replace(
            producer_group=group, topic=topic, key=key, tag=tag, content_type=content_type, body_digest=with_body(body)
        ),
        plain=plain,
    )
    texts = [text for text in (group, topic, key, tag, content_type) if text is not None]
    escaped = any(json.dumps(text, ensure_ascii=False) != f'"{text}"' for text in texts)
    assert is_confirmed(db, row) == (not escaped)


DIFFERENCES: tuple[tuple[str, Any], ...] = (
    ("producer_group", "other"),
    ("topic", "orders"),
    ("key", None),
    ("key", "null"),
    ("tag", "t"),
    ("tag", "null"),
    ("content_type", "text/plain"),
    ("body_digest", TWO),
    ("digest", None),
    ("position", 1),
    ("headers", '{"a": ": b"}'),
    ("headers", '{"a": "b", "c": ""}'),
    ("headers", None),
    ("headers", "[]"),
    ("context", '{"order": "1030"}'),
    ("context", '{"order": 1031}'),
    ("context", None),
    ("deliver_after_s", 1.0),
    # These are judged row by row, also where they are right.
    ("deliver_after_s", 0.0),
    ("policy", "{}"),
)


@pytest.mark.parametrize(("name", "value"), DIFFERENCES)
def test_any_difference_leaves_a_transaction_unconfirmed(db: Connection, name: str, value: Any) -> None:
    row = with_digest(USUAL._replace(headers='{"a": ":b"}', context='{"order": 1030}'))
    assert is_confirmed(db, row)
    assert not is_confirmed(db, row._replace(**{name: value}))


def test_another_body_and_a_reissue_leave_a_transaction_unconfirmed(db: Connection) -> None:
    for messages in ([with_digest(USUAL)], several(db)):
        assert is_confirmed(db, *messages)
        assert unconfirmed(db, messages, body=b"other") == {row.position for row in messages}
        assert unconfirmed(db, messages, reissued_from=ID) == {row.position for row in messages}
        with db.transaction(force_rollback=True):
            db.execute(
                "insert into reissue (transaction_id, reissued_as, reason, at) values (%s, %s, 'asked', now())",
                [UUID(int=1), messages[0].transaction_id],
            )
            assert not is_confirmed(db, *messages)


# The names of several headers are in another order in jsonb: by length first.
HEADERS = st.dictionaries(st.text("abC-", min_size=1, max_size=3), TEXT | st.text(' ,:"\\'), min_size=1, max_size=4)


@given(HEADERS)
def test_headers_are_confirmed_only_as_they_are(db: Connection, headers: dict[str, str]) -> None:
    row = with_digest(USUAL._replace(headers=json.dumps(headers)))
    assert is_confirmed(db, row)
    for name, value in headers.items():
        # Some differ by spaces alone, and some by their type.
        for other in (f"{value} ", f" {value}", value.replace(" ", ""), "", None, [value], "1", 1, True, {"a": value}):
            if other != value:
                assert not is_confirmed(db, row._replace(headers=json.dumps(headers | {name: other}))), other
        assert not is_confirmed(db, row._replace(headers=json.dumps(headers | {f"{name}d": value})))
        assert not is_confirmed(db, row._replace(headers=json.dumps({k: v for k, v in headers.items() if k != name})))


FORMS = st.sampled_from(['{"a": 5}', '{"a": "5"}', '{"a": 5.0}', '{"a": true}', '{"a": "true"}', '{"a": null}'])


@given(JSON | FORMS.map(json.loads), JSON | FORMS.map(json.loads))
def test_a_context_is_confirmed_only_as_it_is(db: Connection, posted: Any, kept: Any) -> None:
    """Whatever Postgres confirms, this process would too."""
    row = stored(db, request([{"topic": "order", "body": 1}], json.dumps({"a": posted, "b": 1})))[0]
    BODIES[row.body_digest] = b"1"
    for value in (posted, kept):
        changed = row._replace(context=json.dumps({"a": value, "b": 1}))
        assert not (is_confirmed(db, changed) and is_altered([changed]))


def test_a_context_of_flat_values_is_confirmed(db: Connection) -> None:
    for context in ('{"order": 1030}', '{"id": "a: b, c"}', '{"ä": true}', '{"n": null}', r'{"a": "\\"}'):
        assert is_confirmed(db, with_digest(USUAL._replace(context=context))), context
    for context in ('{"bb": 1, "a": 2}', '{"": ", ", ": ": ": ", "é\\"": "\\u0001\\u007f/"}', '{"a": [], "b": {}}'):
        assert is_confirmed(db, with_digest(USUAL._replace(context=context))), context
    for context in ("[]", '": x"', '[": x"]', "null", "{}", '{"a": {"b": 1}}', '{"a": [1, 2], "b": 2}', '{"a": 1e16}'):
        row = with_digest(USUAL._replace(context=context))
        assert not is_confirmed(db, row), context
        assert not is_altered([row]), context


@given(st.floats(0) | st.integers(0, 2**53).map(float))
@example(1e15)
@example(0.0)
def test_a_delay_is_confirmed_only_as_it_is(db: Connection, delay_s: float) -> None:
    row = with_digest(USUAL._replace(deliver_after_s=delay_s))
    assert is_confirmed(db, row) == (1 <= delay_s <= 1e15 and delay_s.is_integer())
    assert not is_confirmed(db, row._replace(deliver_after_s=math.nextafter(delay_s, 0) if delay_s else 1.0))


def test_other_content_with_the_same_text_is_not_confirmed(db: Connection) -> None:
    # Without escapes the second row of each pair has the text of the first one's digest.
    tab = with_digest(USUAL._replace(key="a\tb"))
    escaped = tab._replace(key=r"a\tb")
    comma = with_digest(USUAL._replace(topic="t", key=",null,", tag="g"))
    moved = comma._replace(topic='t",', key=None, tag=',"g')
    assert [is_confirmed(db, row) for row in (tab, escaped, comma, moved)] == [False, False, True, False]


SEVERAL: tuple[dict[str, Any], ...] = (
    {"topic": "order", "key": "k", "body": 1, "headers": {"region": "eu", "id": "5"}},
    {"topic": "bill", "tag": "t", "body_base64": "", "headers": {"a": "b"}, "content_type": "text/plain"},
    {"topic": "order", "body": 2, "deliver_after_s": 5},
)


def several(db: Connection) -> list[StoredMessage]:
    """Return a transaction of three messages, as the service stores it."""
    return stored(db, request(SEVERAL, '{"order": 1030, "by": "x"}'))


def test_several_messages_are_confirmed_together(db: Connection) -> None:
    assert is_confirmed(db, *several(db))
    assert is_confirmed(db, *stored(db, posted(PlainRequest, f'"messages":{json.dumps(SEVERAL)}}}')))
    assert is_confirmed(db, *stored(db, request([SEVERAL[0]] * 100)))
    # The first alone, and another transaction beside it.
    rows = [row._replace(transaction_id=str(UUID(int=UUID(ID).int + 1))) for row in several(db)]
    assert is_confirmed(db, with_digest(USUAL), *rows)
    assert unconfirmed(db, [with_digest(USUAL), *rows[:2]]) == {0, 1}
    # A confirmed one says nothing of another.
    assert unconfirmed(db, [*several(db), *rows[:2]]) == {0, 1}


Altered: TypeAlias = Callable[[list[StoredMessage]], list[StoredMessage]]
PLACES = (0, 1, 2)


def one(place: int, **values: Any) -> Altered:
    """Return the change of one message of a transaction."""
    return lambda rows: [row._replace(**values) if row.position == place else row for row in rows]


def another(row: StoredMessage, **values: Any) -> StoredMessage:
    return row._replace(digest=None, context=None, **values)


ALTERED: dict[str, Altered] = {
    "two messages in another order": lambda rows: [rows[0], rows[2]._replace(position=1), rows[1]._replace(position=2)],
    "the first message exchanged": lambda rows: [
        rows[0]._replace(**{n: getattr(rows[1], n) for n in ("topic", "key", "tag", "headers", "content_type")}),
        *rows[1:],
    ],
    "the last is missing": lambda rows: rows[:-1],
    "one between is missing": lambda rows: [rows[0], rows[2]],
    "one between is missing, the last moved": lambda rows: [rows[0], rows[2]._replace(position=1)],
    "the first is missing": lambda rows: rows[1:],
    "a gap": lambda rows: [*rows[:2], rows[2]._replace(position=3)],
    "all moved": lambda rows: [row._replace(position=row.position + 1) for row in rows],
    "all moved down": lambda rows: [row._replace(position=row.position - 1) for row in rows],
    # As many rows as the highest position needs.
    "one before and a gap": lambda rows: [
        rows[0]._replace(position=-1, digest=None, context=None),
        rows[1]._replace(position=0, digest=rows[0].digest, context=rows[0].context),
        rows[2],
    ],
    "one more": lambda rows: [*rows, another(rows[1], position=3)],
    "one more whose headers have no text": lambda rows: [*rows, another(rows[1], position=3, headers="[]")],
    "one more whose delay has no text": lambda rows: [*rows, another(rows[1], position=3, deliver_after_s=0.5)],
    "one more, far": lambda rows: [*rows, another(rows[1], position=30)],
    "one more, before": lambda rows: [another(rows[1], position=-1), *rows],
    "no digest": one(0, digest=None),
    "the digest elsewhere": lambda rows: one(1, digest=rows[0].digest)(one(0, digest=None)(rows)),
    "another context": one(0, context='{"order": 1030, "by": "y"}'),
    "a context of another type": one(0, context='{"order": "1030", "by": "x"}'),
    "no context": one(0, context=None),
    "a policy": one(0, policy="{}"),
    "another group of all": lambda rows: [row._replace(producer_group="other") for row in rows],
    "a quote": lambda rows: one(1, tag='t",null,"')(rows),
    **{f"another group of {at}": one(at, producer_group="other") for at in PLACES},
    # It is sorted behind the others.
    **{f"a later group of {at}": one(at, producer_group="\U0010ffff") for at in PLACES},
    **{f"another topic of {at}": one(at, topic="orders") for at in PLACES},
    **{f"another key of {at}": one(at, key="K") for at in PLACES},
    **{f"another tag of {at}": one(at, tag="T") for at in PLACES},
    **{f"no body of {at}": one(at, body_digest=NOTHING if at != 1 else ONE) for at in PLACES},
    **{f"another content type of {at}": one(at, content_type="text/html") for at in PLACES},
    **{f"another delay of {at}": one(at, deliver_after_s=6.0) for at in PLACES},
    **{f"another header of {at}": one(at, headers='{"region": "us", "id": "5"}') for at in PLACES},
    **{f"a header of another type of {at}": one(at, headers='{"region": "eu", "id": 5}') for at in PLACES},
    **{f"headers that are no object of {at}": one(at, headers="[]") for at in PLACES},
    "no delay": one(2, deliver_after_s=None),
    "no headers": one(0, headers=None),
}


@pytest.mark.parametrize("name", ALTERED)
@pytest.mark.parametrize("plain", [False, True])
def test_an_altered_transaction_of_several_messages_is_not_confirmed(db: Connection, name: str, plain: bool) -> None:
    rows = several(db)
    rows[0] = rows[0]._replace(digest=digest_of(rows, plain=plain))
    assert is_confirmed(db, *rows)
    altered = ALTERED[name](rows)
    assert unconfirmed(db, altered) == {row.position for row in altered}


def test_a_message_before_the_first_and_a_gap_are_not_confirmed(db: Connection) -> None:
    rows = stored(db, request([*SEVERAL, SEVERAL[0]]))
    # As many rows as the highest position needs, with their messages in order.
    changed = [
        row._replace(position=position, digest=rows[0].digest if position == 0 else None)
        for row, position in zip(rows, (-1, 0, 1, 3), strict=True)
    ]
    assert is_confirmed(db, *rows)
    assert unconfirmed(db, changed) == {-1, 0, 1, 3}


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.integers(1, 6), st.integers(0, 1))
def test_only_all_messages_in_their_order_are_confirmed(
    db: Connection, order: list[int], missing: set[int], number: int, moved: int
) -> None:
    rows = stored(db, request([{"topic": "o", "key": str(place), "body": 1} for place in range(number)]))
    changed = [
        rows[place]._replace(position=at + moved, digest=rows[0].digest if at + moved == 0 else None)
        for at, place in enumerate(place for place in order if place < number and place not in missing)
    ]
    assert not changed or is_confirmed(db, *changed) == (changed == rows)


def read(spark: SparkSession, dsn: str, day: date, directory: Path) -> Frames:
    with open_snapshot(dsn) as snapshot:
        snapshot.lock([day])
        return frames_from_postgres(spark, snapshot, day, str(directory), Progress(io.StringIO()))


@pytest.mark.parametrize("at_work", [False, True])
def test_altered_transactions_of_a_day_are_read_in_several_ranges(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: bool
) -> None:
    day = days_ago(3)
    # 100 transactions are the day's first 10 s, so most ranges are empty.
    fill_day(dsn, day, 100)
    monkeypatch.setattr(scan, "PAGES_AT_ONCE", 1)
    monkeypatch.setattr(copy, "others_are_at_work", lambda cursor: at_work)
    monkeypatch.setattr(copy, "RESTS", 0.001)
    monkeypatch.setattr(half_digests, "WHOLE_AT_ONCE", 2)
    with psycopg.connect(dsn) as connection:
        # One without its digest, one with another key, and three with a new message, of which one has lost its first.
        [second, third, *first] = [
            row["transaction_id"] for row in rows(dsn, "select transaction_id from half order by 1 limit 5")
        ]
        connection.execute(
            "insert into half (transaction_id, position, producer_group, topic, content_type, body, body_digest, "
            "born_at, first_check_at) select transaction_id, 1, producer_group, topic, content_type, body, "
            "body_digest, born_at, first_check_at from half where transaction_id = any(%s)",
            [first],
        )
        connection.execute("delete from half where transaction_id = %s and position = 0", [first[2]])
        connection.execute("update half set digest = null where transaction_id = %s", [second])
        connection.execute("update half set key = 'another' where transaction_id = %s", [third])
    f = read(spark, dsn, day, tmp_path)
    assert f.altered is not None
    found = {UUID(row.transaction_id): row for row in f.altered.collect()}
    assert set(found) == {*first, second, third}
    assert {row.producer_group for row in found.values()} == {"shop"}
    assert found[second].digest is None
    assert found[third].digest != found[third].computed
    assert [found[one].digest is None for one in first] == [False, False, True]
    assert all(found[one].digest != found[one].computed for one in first)
    assert len({row.computed for row in found.values()}) == 5
    assert {row.differs for row in found.values()} == {"digest"}


def test_frames_that_say_nothing_of_digests_are_not_judged_by_them(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    day = days_ago(3)
    fill_day(dsn, day, 3)
    f = read(spark, dsn, day, tmp_path)
    assert f.altered is not None
    described = json.loads((tmp_path / "frames.json").read_text())
    assert described.pop("altered") == 0
    (tmp_path / "frames.json").write_text(json.dumps(described))
    former = frames_from_parquet(spark, str(tmp_path))
    assert former.altered is None
    assert replace(former, altered=f.altered, rows=f.rows).rows == f.rows
