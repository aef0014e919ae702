"""Only a head that the parser has read, byte for byte but for its length, is known."""

import pytest

from app.server.known_heads import HEADS_MAX, Headers, KnownHeads

HEAD = b"POST /half HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nX-A: b\r\n\r\n"
HEADERS = [(b"host", b"localhost"), (b"content-length", b"2"), (b"x-a", b"b")]


def knowing(head: bytes = HEAD, headers: Headers = HEADERS, body: bytes = b"{}") -> KnownHeads[str]:
    heads: KnownHeads[str] = KnownHeads()
    heads.note(head + body, "half", b"/half", headers, b"{}")
    return heads


def test_a_known_head_may_have_another_length() -> None:
    found = knowing().find(HEAD.replace(b": 2", b": 12") + b"x" * 12)
    assert found is not None
    head, length, body = found
    assert (head.route, head.target, length, body) == ("half", b"/half", b"12", b"x" * 12)
    assert head.headers(length) == [(b"host", b"localhost"), (b"content-length", b"12"), (b"x-a", b"b")]


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"{",
        HEAD + b"{} ",
        HEAD + b"{}" + HEAD + b"{}",
        HEAD[:-1],
        HEAD.replace(b"half", b"end") + b"{}",
        HEAD.replace(b"X-A: b", b"X-A: c") + b"{}",
        HEAD.replace(b"X-A: b", b"X-A: b\r\nContent-Length: 2") + b"{}",
        HEAD.replace(b"X-A: b", b"Transfer-Encoding: chunked") + b"{}",
        HEAD.replace(b": 2", b": +2") + b"{}",
        HEAD.replace(b": 2", b": 2 ") + b"{}",
        HEAD.replace(b": 2", b": ") + b"{}",
        HEAD.replace(b"\r\nX-A: b", b"\nX-A: b") + b"{}",
        b"\r\n" + HEAD + b"{}",
        b"",
    ],
)
def test_other_bytes_are_not_known(data: bytes) -> None:
    assert knowing().find(data) is None


@pytest.mark.parametrize(
    "heads",
    [
        knowing(body=b"{} "),
        knowing(body=b"{"),
        knowing(HEAD.replace(b": 2", b": 3"), [*HEADERS[:1], (b"content-length", b"3"), *HEADERS[2:]]),
        knowing(HEAD.replace(b"X-A", b"Traceparent"), [*HEADERS[:2], (b"traceparent", b"b")]),
        knowing(HEAD.replace(b"X-A", b"Upgrade"), [*HEADERS[:2], (b"upgrade", b"b")]),
        knowing(HEAD.replace(b"X-A: b", b"X-A: " + b"b" * 2000), [*HEADERS[:2], (b"x-a", b"b" * 2000)]),
    ],
)
def test_what_is_not_a_whole_plain_request_is_not_remembered(heads: KnownHeads[str]) -> None:
    assert heads._heads == {}


def test_the_number_of_heads_is_bounded() -> None:
    heads = knowing()
    for number in range(3 * HEADS_MAX):
        value = str(number).encode()
        heads.note(HEAD.replace(b"X-A: b", b"X-A: " + value) + b"{}", "half", b"/half", HEADERS, b"{}")
        assert len(heads._heads) <= HEADS_MAX
