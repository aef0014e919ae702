"""Frames, ids and properties of the remoting protocol."""

import contextlib
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.coordinator.wire import POLICY_MAX_S
from app.coordinator.wire import Message as HalfnoteMessage
from app.ids import is_uuid7
from app.rocketmq.message_ids import transaction_id
from app.rocketmq.receiving import ClaimedDelivery
from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.frames import BINARY_HEADER, JSON_HEADER, FrameFault, RemotingFrame, decode, encode
from app.rocketmq.remoting.names import namespaced, producer_group_of, subscription_of, topic_of, with_namespace
from app.rocketmq.remoting.read_messages import claimed_message
from app.rocketmq.remoting.sent_messages import _INTERNAL, IMMUNITY, IMMUNITY_MAX_S, SendFields, delay_s, sent_message
from app.rocketmq.remoting.store_format import (
    LogMessage,
    batched_messages,
    encode_message,
    message_id,
    properties_text,
    read_properties,
)
from app.rocketmq.remoting.transaction_places import places_of, transaction_at
from app.rocketmq.remoting.unique_keys import made_at
from tests.support.remoting import read_messages

TIMES = st.integers(1_609_545_600_000, 4_102_444_800_000).map(lambda ms: datetime.fromtimestamp(ms / 1000, UTC))
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PROPERTY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=40)


@given(
    st.integers(-(2**15), 2**15 - 1),
    INT32,
    INT32,
    st.none() | TEXT.filter(bool),
    st.dictionaries(TEXT, TEXT, max_size=5),
    st.binary(max_size=50),
    st.sampled_from([JSON_HEADER, BINARY_HEADER]),
)
def test_a_frame_is_read_as_it_was_written(
    code: int, opaque: int, flag: int, remark: str | None, fields: dict[str, str], body: bytes, header: int
) -> None:
    frame = RemotingFrame(code, opaque, flag, remark, fields, body, header)
    content = encode(frame)
    assert int.from_bytes(content[:4], "big") == len(content) - 4
    assert decode(content[4:]) == frame


@given(st.binary(max_size=200), st.sampled_from([0, 1, 2]), st.integers(0, 250))
def test_any_bytes_are_a_frame_or_a_fault(content: bytes, header: int, length: int) -> None:
    with contextlib.suppress(FrameFault):
        decode(bytes([header]) + length.to_bytes(3, "big") + content)


@given(TIMES, st.binary(max_size=20))
def test_a_transaction_id_is_two_positions(at: datetime, content: bytes) -> None:
    transaction = transaction_id(at, content)
    position, queue_position = places_of(transaction)
    assert 0 <= position < 2**63
    assert 0 <= queue_position < 2**62
    assert transaction_at(position, queue_position) == transaction
    # As the client finds it in the id of the message.
    assert int(message_id(("127.0.0.1", 9876), position)[16:], 16) == position


@pytest.mark.parametrize(("position", "queue_position"), [(-1, 0), (0, -1), (2**63, 0), (0, 2**62)])
def test_other_positions_are_of_no_transaction(position: int, queue_position: int) -> None:
    assert transaction_at(position, queue_position) is None


@given(
    TIMES,
    st.integers(-48, 56),
    st.integers(-60_000, 839_999),
)
@example(datetime(2026, 11, 29, 9, 30, tzinfo=UTC), 0, -5)
def test_an_id_has_the_time_at_which_it_was_made_in_any_zone(made: datetime, quarters: int, later_ms: int) -> None:
    made = made.replace(microsecond=made.microsecond // 1000 * 1000)
    local = made + timedelta(minutes=15 * quarters)
    month = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    span = (local - month) // timedelta(milliseconds=1)
    # A clock that was set back says that the message was sent before it was made.
    sent_ms = (made - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1) + later_ms
    for address in ("C0A80001", "FD" + "0" * 30):
        assert made_at(f"{address}04D218B4AAC2{span:08X}0001", sent_ms) == made


def test_an_id_of_another_form_has_no_time() -> None:
    for unique_key in ("", "chosen-by-the-shop", "C0A8000104D218B4AAC2", "019a9f1c-1030-7b1e-8f00-1030a1030a10"):
        assert made_at(unique_key, 1_700_000_000_000) is None
    for sent_ms in (0, 1, 2**42):
        assert made_at("C0A8000104D218B4AAC24F2F4D200000", sent_ms) is None
    assert is_uuid7(UUID("019a9f1c-1030-7b1e-8f00-1030a1030a10"))


@given(st.dictionaries(PROPERTY, PROPERTY, max_size=5), st.binary(max_size=50))
def test_a_message_is_read_as_it_was_written(properties: dict[str, str], body: bytes) -> None:
    assert read_properties(properties_text(properties)) == properties
    message = LogMessage("order", body, properties, 3, 7, 2**61, 1, 2, 4)
    [read] = read_messages(encode_message(message, ("127.0.0.1", 9876)))
    assert (read.topic, read.body, read.properties) == ("order", body, properties)
    assert (read.queue_id, read.queue_offset, read.position, read.reconsume_times) == (3, 7, 2**61, 4)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_batch_or_a_fault(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        list(batched_messages(content))


FIELDS = SendFields("shop", "order", 0, 0, 0, "", 0, -1, False)
WORD = st.sampled_from(["order-1030", "k1", "k2"])


@given(st.lists(WORD, max_size=3), st.none() | WORD)
def test_the_keys_of_a_message_come_back_beside_its_sharding_key(keys: list[str], sharding_key: str | None) -> None:
    properties = {"UNIQ_KEY": "id"}
    if keys:
        properties["KEYS"] = " ".join(keys)
    if sharding_key:
        properties["__SHARDINGKEY"] = sharding_key
    assert read_back(properties) == properties


@given(st.dictionaries(PROPERTY.filter(lambda name: name not in _INTERNAL), PROPERTY.filter(str.strip), max_size=5))
@example({"note": "line 1\nline 2", "a\tb": "\x00", "Note": "c"})
def test_properties_come_back_with_their_control_characters(properties: dict[str, str]) -> None:
    assert read_back({"UNIQ_KEY": "id", **properties}) == {"UNIQ_KEY": "id", **properties}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("7200", 7200), ("+60", 60), ("86400", 86_400), ("0", 1), ("-7", 1)),
        # RocketMQ's servers take their own time then.
        *(("-1", None), ("soon", None), ("1.5", None), ("\u0663", None), ("9" * 30, None), (None, None)),
    ],
)
def test_the_immunity_of_a_half_is_read_as_rocketmqs_servers_read_it(text: str | None, seconds: int | None) -> None:
    properties = {"UNIQ_KEY": "id", "TRAN_MSG": "true", **({IMMUNITY: text} if text is not None else {})}
    assert sent_message(b"a", properties, FIELDS, "order", 10).immunity_s == seconds


def test_no_half_has_a_longer_immunity_than_halfnote_allows() -> None:
    assert IMMUNITY_MAX_S == POLICY_MAX_S
    with pytest.raises(CallRefused, match=str(IMMUNITY_MAX_S)):
        sent_message(b"a", {"UNIQ_KEY": "id", "TRAN_MSG": "true", IMMUNITY: "86401"}, FIELDS, "order", 10)


def read_back(properties: dict[str, str]) -> dict[str, str]:
    """Return the properties with which a consumer gets a message that was sent with these."""
    sent = sent_message(b"a", properties, FIELDS, "order", 10)
    # What Halfnote itself would refuse raises here.
    message = HalfnoteMessage(topic="order", headers=sent.fields["headers"], body_base64="")
    one = ClaimedDelivery(
        message_id="0193a7d6-a5c8-7b1e-8f00-1030a1030a10-0",
        topic="order",
        key=sent.fields.get("key"),
        tag=sent.fields.get("tag"),
        headers=dict(message.headers or {}),
        body_base64=sent.fields["body_base64"],
        handle="h",
        offset=7,
        committed_at=datetime(2026, 11, 29, tzinfo=UTC),
        attempt=1,
    )
    found = dict(claimed_message(one, "order", 0, 0, 0).properties)
    assert found.pop("HALFNOTE_HANDLE") == "h"
    return found


def test_names_have_namespaces() -> None:
    assert (topic_of("shop%order"), topic_of("order")) == ("shop.order", "order")
    assert subscription_of("shop%points", "shop.order") == "shop.points@shop.order"
    assert producer_group_of("shop%orders") == "shop.orders"
    assert namespaced("shop.order", "shop%orders") == "shop%order"
    assert namespaced("shop.order", "orders") == "shop.order"
    assert [with_namespace("order", group) for group in ("points", "shop%points")] == ["order", "shop%order"]
    assert with_namespace("eu%order", "shop%points") == "eu%order"
    assert [delay_s(level) for level in (1, 3, 18, 99)] == [1, 10, 7200, 7200]
