"""W3C Trace Context: which headers are valid, which are dropped, and how a context is passed on."""

import pytest

from app.observability.trace_context import STATE_MAX, context_of, incoming, is_sampled, log_fields, trace_headers

IDS = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
TRACE = f"00-{IDS}-01"


@pytest.mark.parametrize("flags", ["00", "01", "02", "03", "ff"])
def test_a_traceparent_is_kept_as_it_is(flags: str) -> None:
    assert context_of(f"00-{IDS}-{flags}") == f"00-{IDS}-{flags}"
    assert is_sampled(f"00-{IDS}-{flags}") is (int(flags, 16) & 1 == 1)


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        "00",
        IDS,
        f"0-{IDS}-01",
        f"ff-{IDS}-01",
        f"00-{IDS}-1",
        f"00-{IDS}-0g",
        f"00-{IDS}",
        f"00-{IDS}-01-",
        f"00-{IDS}-01-more",
        f" 00-{IDS}-01",
        f"00-{IDS}-01\n",
        f"00-{IDS}-01 ",
        f"00-{IDS.upper()}-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        f"00_{IDS}_01",
        f"01-{IDS}-01more",
        f"00-{IDS}-\u0660\u0661",
    ],
)
def test_a_malformed_one_is_dropped_with_its_state(malformed: str) -> None:
    assert context_of(malformed, "a=1") is None


def test_of_a_later_version_the_ids_and_the_sampled_flag_are_taken() -> None:
    assert context_of(f"cc-{IDS}-07") == f"00-{IDS}-01"
    assert context_of(f"01-{IDS}-00-what-the-future-holds") == f"00-{IDS}-00"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a=1", "a=1"),
        ("a=1,b=2", "a=1,b=2"),
        (" a=1 ,\t, b=2 ,", "a=1,b=2"),
        ('tenant@shop=a b%22"', 'tenant@shop=a b%22"'),
        ("0a/b*c_d-e=~", "0a/b*c_d-e=~"),
        ("", None),
        (",", None),
        ("a", None),
        ("a=", None),
        ("=1", None),
        ("A=1", None),
        ("a=1=2", None),
        ("a=1,a=2", None),
        ("a=é", None),
        ("a=1\x7f", None),
        (",".join(f"k{n}=1" for n in range(32)), ",".join(f"k{n}=1" for n in range(32))),
        (",".join(f"k{n}=1" for n in range(33)), None),
    ],
)
def test_a_state_is_passed_on_or_dropped_alone(given: str, expected: str | None) -> None:
    assert context_of(TRACE, given) == (f"{TRACE} {expected}" if expected else TRACE)


def test_of_a_state_that_is_too_long_go_long_members_first_and_then_the_last() -> None:
    short = [f"k{n}={'v' * 60}" for n in range(9)]
    found = context_of(TRACE, ",".join([short[0], "long=" + "v" * 200, *short[1:]]))
    assert found is not None
    state = trace_headers(found)["tracestate"]
    assert len(state) <= STATE_MAX
    assert state.split(",") == short[:7] + short[7 : len(state.split(","))]
    assert len(",".join(short[: len(state.split(",")) + 1])) > STATE_MAX


def test_headers_in_and_out() -> None:
    come = [(b"host", b"x"), (b"tracestate", b"a=1"), (b"traceparent", TRACE.encode()), (b"tracestate", b"b=2")]
    found = incoming(come)
    assert found == f"{TRACE} a=1,b=2"
    assert trace_headers(found) == {"traceparent": TRACE, "tracestate": "a=1,b=2"}
    assert log_fields(found) == {"trace_id": IDS[:32], "span_id": IDS[33:]}
    # Two parents contradict each other; a state without a parent is dropped.
    assert incoming([*come, (b"traceparent", TRACE.encode())]) is None
    assert incoming([(b"tracestate", b"a=1")]) is None
    assert incoming([(b"traceparent", b"\xff")]) is None
    assert trace_headers(None) == log_fields(None) == {}
    assert not is_sampled(None)
