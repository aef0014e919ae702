"""Names, filters, ids, properties and bodies: RocketMQ's on one side, Halfnote's on the other."""

import gzip
import hashlib
import json
import re
import zlib
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.coordinator.wire import Message as HalfnoteMessage
from app.ids import id_ms, is_uuid7
from app.rocketmq import headers, protocol
from app.rocketmq.bodies import body_of
from app.rocketmq.filters import EXPRESSION_MAX, _conjuncts, filters_of
from app.rocketmq.message_ids import made_at, step_of, transaction_id
from app.rocketmq.names import subscription_of, topic_of
from app.rocketmq.protocol.definition_pb2 import (
    CRC32,
    GZIP,
    MD5,
    MESSAGE_TYPE_UNSPECIFIED,
    SHA1,
    SQL,
    TAG,
    TRANSACTION,
    Code,
    Digest,
    FilterExpression,
    FilterType,
    Resource,
)
from app.rocketmq.receiving import ClaimedDelivery, delivered
from app.rocketmq.refusals import CallRefused, refusal_of
from app.rocketmq.sending import RESERVED, read_message
from tests.support.gateway import BODY_LIMIT, message_of

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
TIMES = st.integers(1_609_459_200_000, 4_102_444_800_000).map(lambda ms: datetime.fromtimestamp(ms / 1000, UTC))
PRINTED = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40).filter(str.strip)


def refused(code: Code) -> "pytest.RaisesExc[CallRefused]":
    return pytest.RaisesExc(CallRefused, check=lambda error: error.code == code)


def test_the_generated_code_is_of_the_proto_files_beside_it() -> None:
    place = Path(protocol.__file__).parent
    for name in ("definition", "service"):
        digest = hashlib.sha256((place / f"{name}.proto").read_bytes()).hexdigest()
        for kind in ("py", "pyi"):
            assert (place / f"{name}_pb2.{kind}").read_text().startswith(f"# From {name}.proto, sha256 {digest}.\n")


def test_a_namespace_is_the_beginning_of_the_name() -> None:
    assert topic_of(Resource(resource_namespace="shop", name="order")) == "shop.order"
    assert topic_of(Resource(name="order.created")) == "order.created"
    group = Resource(resource_namespace="shop", name="points")
    assert subscription_of(group, "shop.order") == "shop.points@shop.order"


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a/b", "a b", "ä", "a" * 128, "halfnote.x", "a\n", "RMQ_SYS_TRACE_TOPIC"]
)
def test_a_topic_that_rocketmq_or_halfnote_would_refuse_is_refused(name: str) -> None:
    with refused(Code.ILLEGAL_TOPIC):
        topic_of(Resource(name=name))


@pytest.mark.parametrize("name", ["", "%DLQ%points", "a|b", "g" * 121, "-points"])
def test_a_consumer_group_that_cannot_be_a_subscription_is_refused(name: str) -> None:
    with refused(Code.ILLEGAL_CONSUMER_GROUP):
        subscription_of(Resource(name=name), "order")


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("*", None),
        ("", None),
        ("created", {"tags": ["created"]}),
        ("paid || created||paid", {"tags": ["created", "paid"]}),
    ],
)
def test_tags(text: str, filters: object) -> None:
    assert filters_of(FilterExpression(expression=text, type=TAG)) == filters


@pytest.mark.parametrize("text", ["a ||", "|| a", "a | b", "||"])
def test_what_is_no_list_of_tags_is_refused(text: str) -> None:
    with refused(Code.ILLEGAL_FILTER_EXPRESSION):
        filters_of(FilterExpression(expression=text, type=TAG))


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("", None),
        ("TRUE", None),
        ("region = 'eu'", {"headers": {"region": "eu"}}),
        ("region='it''s' AND shop = 'a and b'", {"headers": {"region": "it's", "shop": "a and b"}}),
        ("TAGS = 'paid' and (region = 'eu')", {"tags": ["paid"], "headers": {"region": "eu"}}),
        ("tags in ('b', 'a')", {"tags": ["a", "b"]}),
        ("tags in ('b', 'a') and TAGS = 'a'", {"tags": ["a"]}),
    ],
)
def test_sql_that_a_subscription_can_do(text: str, filters: object) -> None:
    assert filters_of(FilterExpression(expression=text, type=SQL)) == filters


@pytest.mark.parametrize(
    "text",
    [
        "a > 3",
        "a = 3",
        "a is not null",
        "a = 'x' or b = 'y'",
        "not a = 'x'",
        "a = 'x' and a = 'y'",
        "tags = 'a' and tags = 'b'",
        "a between 'x' and 'y'",
        "_a = 'x'",
        "rocketmq-keys = 'x'",
        "a = 'x' and",
        "a = 'x' and and b = 'y'",
        "'x' = a",
    ],
)
def test_other_sql_is_refused_rather_than_ignored(text: str) -> None:
    with refused(Code.ILLEGAL_FILTER_EXPRESSION):
        filters_of(FilterExpression(expression=text, type=SQL))


@pytest.mark.parametrize("kind", [TAG, SQL])
def test_a_giant_expression_is_refused_and_the_error_does_not_repeat_it(kind: FilterType) -> None:
    for text in ("a" * EXPRESSION_MAX + "=", "|" * EXPRESSION_MAX, "=" + "|" * (EXPRESSION_MAX - 1)):
        with pytest.raises(CallRefused) as error:
            filters_of(FilterExpression(expression=text, type=kind))
        assert error.value.code == Code.ILLEGAL_FILTER_EXPRESSION
        assert len(error.value.text) < 500


def test_the_longest_tags_of_a_subscription_fit_into_an_expression() -> None:
    tags = [f"{number:03}" + "t" * 252 for number in range(100)]
    assert filters_of(FilterExpression(expression=" || ".join(tags), type=TAG)) == {"tags": tags}
    listed = ", ".join(f"'{tag}'" for tag in tags)
    assert filters_of(FilterExpression(expression=f"TAGS in ({listed})", type=SQL)) == {"tags": tags}


@pytest.mark.parametrize("text", [" ", "\u2003", "a and ", "and ", "'", "''", "' ' ", "(", "a=''and "])
def test_the_time_to_read_an_expression_grows_no_faster_than_its_length(text: str) -> None:
    # Steps that grow with the square of the length would not end within the time of a test.
    _conjuncts("a" + text * (3_000_000 // len(text)) + "b")


CONJUNCT = st.sampled_from(["a = 'x'", "(b='y and z')", "TAGS = 'it''s and'", "c = ' and '", "'", "d"])


@given(st.lists(CONJUNCT, min_size=1, max_size=6), st.sampled_from([" and ", "\tAND\n", "  And ", "and"]))
def test_an_expression_is_divided_at_each_and_outside_of_quotes(conjuncts: list[str], between: str) -> None:
    text = between.join(conjuncts)
    former = re.split(r"(?i)\s+and\s+(?=(?:[^']*'[^']*')*[^']*$)", text)
    if text.count("'") % 2:
        # A quote that does not end makes the expression one that is refused, wherever it is divided.
        with refused(Code.ILLEGAL_FILTER_EXPRESSION):
            filters_of(FilterExpression(expression=text, type=SQL))
    else:
        assert _conjuncts(text) == [part.strip() for part in former]


def test_a_version_1_id_has_its_second() -> None:
    assert made_at("0156F7E71C361B21BC024CCDBE00000000") == datetime(2022, 3, 23, 14, 50, 38, tzinfo=UTC)
    assert made_at("0056F7E71C361B21BC024CCDBE00000000") is None
    assert made_at("order-1030") is None


@given(TIMES, st.binary(), st.binary())
def test_the_transaction_id_is_a_uuidv7_of_time_and_content(at: datetime, content: bytes, other: bytes) -> None:
    made = transaction_id(at, content)
    assert is_uuid7(made)
    assert abs(id_ms(made) - at.timestamp() * 1000) < 1
    assert transaction_id(at, content) == made
    assert (transaction_id(at, other) == made) == (other == content)
    assert timedelta() <= at - step_of(at) < timedelta(seconds=120)


@given(st.dictionaries(PRINTED.filter(lambda name: name not in RESERVED), PRINTED, max_size=6))
def test_properties_come_back_whatever_their_names(properties: dict[str, str]) -> None:
    made = headers.of_properties(properties)
    # What Halfnote itself would refuse raises here.
    HalfnoteMessage(topic="order", headers=made, body_base64="")
    assert headers.to_properties(made) == properties


GROUPS = st.sampled_from(["g1", "order 1030"])


@given(
    keys=st.lists(GROUPS | PRINTED, max_size=3),
    tag=st.none() | st.sampled_from(["created", "paid"]),
    group=st.none() | GROUPS,
    body=st.binary(min_size=1, max_size=100),
)
def test_a_message_comes_back_as_it_was_sent(keys: list[str], tag: str | None, group: str | None, body: bytes) -> None:
    given_one = message_of("order", body, tag=tag, keys=keys, message_group=group, born_host="here")
    sent = read_message(given_one, "order", BODY_LIMIT)
    claimed = ClaimedDelivery(
        message_id="0193a7d6-a5c8-7b1e-8f00-1030a1030a10-0",
        topic="order",
        key=sent.fields.get("key"),
        tag=sent.fields.get("tag"),
        headers=dict(sent.fields["headers"]),
        body_base64=sent.fields["body_base64"],
        handle="h",
        offset=7,
        committed_at=NOW,
        attempt=2,
    )
    back = delivered(claimed, given_one.topic, 30.0)
    system = back.system_properties
    assert (back.body, back.topic, system.message_id) == (body, given_one.topic, given_one.system_properties.message_id)
    assert (list(system.keys), system.tag, system.message_group) == (keys, tag or "", group or "")
    assert (system.receipt_handle, system.delivery_attempt, system.queue_offset) == ("h", 2, 7)
    assert system.body_digest.checksum == hashlib.md5(body).hexdigest().upper()
    assert (system.born_host, system.invisible_duration.seconds) == ("here", 30)


def test_a_repeated_send_has_the_same_content_whatever_the_client_fills_in_anew() -> None:
    first = message_of("order", b"x", "0156F7E71C361B21BC024CCDBE00000000", keys=["a", "b"])
    again = message_of("order", b"x", "0156F7E71C361B21BC024CCDBE00000000", keys=["a", "b"], queue_id=3)
    again.system_properties.born_timestamp.GetCurrentTime()
    other = message_of("order", b"y", "0156F7E71C361B21BC024CCDBE00000000", keys=["a", "b"])
    contents = [read_message(one, "order", BODY_LIMIT).content for one in (first, again, other)]
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("checksum", [f"{zlib.crc32(b'a6'):08X}", f"{zlib.crc32(b'a6'):x}", str(zlib.crc32(b"a6"))])
def test_crc32_is_known_in_each_form_that_clients_write(checksum: str) -> None:
    made = message_of("order", b"a6", body_digest=Digest(type=CRC32, checksum=checksum))
    assert body_of(made, BODY_LIMIT) == b"a6"
    with refused(Code.MESSAGE_CORRUPTED):
        body_of(message_of("order", b"a7", body_digest=Digest(type=CRC32, checksum=checksum)), BODY_LIMIT)


@pytest.mark.parametrize(("kind", "digest"), [(MD5, hashlib.md5), (SHA1, hashlib.sha1)])
def test_other_digests_are_checked(kind: int, digest: "type[hashlib._Hash]") -> None:
    right = Digest(type=kind, checksum=digest(b"body").hexdigest().upper())
    assert body_of(message_of("order", b"body", body_digest=right), BODY_LIMIT) == b"body"
    with refused(Code.MESSAGE_CORRUPTED):
        body_of(message_of("order", b"other", body_digest=right), BODY_LIMIT)


def test_a_compressed_body_is_stored_plain_and_cannot_be_a_bomb() -> None:
    packed = message_of("order", gzip.compress(b"x" * 1000), body_encoding=GZIP)
    assert b64decode(read_message(packed, "order", 1000).fields["body_base64"]) == b"x" * 1000
    with refused(Code.MESSAGE_BODY_TOO_LARGE):
        body_of(packed, 999)
    for broken in (b"no gzip", gzip.compress(b"x" * 1000)[:-9]):
        with refused(Code.MESSAGE_CORRUPTED):
            body_of(message_of("order", broken, body_encoding=GZIP), 1000)


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (Code.ILLEGAL_MESSAGE_TAG, {"tag": "a|b"}),
        (Code.ILLEGAL_MESSAGE_TAG, {"tag": " "}),
        (Code.ILLEGAL_MESSAGE_TAG, {"tag": "a\x01"}),
        (Code.ILLEGAL_MESSAGE_KEY, {"keys": ["a", " "]}),
        (Code.ILLEGAL_MESSAGE_KEY, {"keys": ["a\n"]}),
        (Code.ILLEGAL_MESSAGE_GROUP, {"message_group": "g" * 64}),
        (Code.ILLEGAL_MESSAGE_GROUP, {"message_group": "\t"}),
        (Code.ILLEGAL_MESSAGE_ID, {"message_id": " "}),
        (Code.ILLEGAL_MESSAGE_PROPERTY_KEY, {"user_properties": {"KEYS": "a"}}),
        (Code.ILLEGAL_MESSAGE_PROPERTY_KEY, {"user_properties": {"a": "\x02"}}),
        (Code.MESSAGE_PROPERTIES_TOO_LARGE, {"user_properties": {str(n): "a" for n in range(129)}}),
        (Code.MESSAGE_PROPERTIES_TOO_LARGE, {"user_properties": {"a": "a" * 16_384}}),
        (Code.UNSUPPORTED, {"message_type": 5}),
        (Code.UNSUPPORTED, {"message_type": 6}),
    ],
)
def test_what_rocketmqs_proxy_refuses_is_refused_with_its_code(code: Code, fields: dict[str, object]) -> None:
    with refused(code):
        read_message(message_of("order", b"x", **fields), "order", BODY_LIMIT)


def test_a_message_without_a_type_is_no_half() -> None:
    sent = read_message(message_of("order", b"x", message_type=MESSAGE_TYPE_UNSPECIFIED), "order", 10)
    assert (sent.transactional, sent.fields["body_base64"]) == (False, "eA==")


def test_empty_and_large_bodies_are_refused() -> None:
    with refused(Code.MESSAGE_BODY_EMPTY):
        read_message(message_of("order", b""), "order", 10)
    with refused(Code.MESSAGE_BODY_TOO_LARGE):
        read_message(message_of("order", b"x" * 11), "order", 10)


def test_a_half_asks_for_its_body_in_checks_and_for_the_clients_immunity() -> None:
    made = message_of("order", b"x", message_type=TRANSACTION)
    made.system_properties.orphaned_transaction_recovery_duration.seconds = 60
    request = read_message(made, "order", 10).request("order", "id", NOW)
    assert request["check"] == {"include_body": True, "immunity_s": 60}
    made.system_properties.orphaned_transaction_recovery_duration.seconds = 3601
    with refused(Code.BAD_REQUEST):
        read_message(made, "order", 10)


def test_problems_have_a_code_and_say_what_halfnote_says() -> None:
    answer = refusal_of(
        422, {"type": "/problems/invalid", "title": "Wrong", "detail": "too long", "field": "messages[0].key"}
    )
    assert (answer.code, answer.text) == (Code.ILLEGAL_MESSAGE_KEY, "Wrong: too long")
    assert refusal_of(503, {"type": "/problems/database-unavailable"}).code == Code.PROXY_TIMEOUT
    assert refusal_of(503, {"type": "/problems/overloaded"}).code == Code.TOO_MANY_REQUESTS
    assert refusal_of(500, {}).code == Code.INTERNAL_SERVER_ERROR
    assert re.search("502", refusal_of(502, {}).text)


def test_keys_of_a_message_that_another_producer_sent() -> None:
    assert headers.to_keys({}, "order-1030") == ["order-1030"]
    assert headers.to_keys({headers.KEYS: json.dumps(["a", "b"])}, "a") == ["a", "b"]
    assert headers.to_keys({headers.KEYS: "no json"}, None) == []
    assert headers.to_keys({headers.KEYS: '["\\ud83d\\ude00", "\\u00e4", 7]'}, None) == ["\U0001f600", "\u00e4", "7"]
