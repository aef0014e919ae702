"""Heads of the fast path that the parser has read before, so that a request with the same head needs no parsing.

A client sends the same head with each request, but for the length of the body. The parser and `check_head` have
accepted the rest of these bytes, so their result holds again. Everything after them, such as the check of the key, is
done for each request. Only whole requests are looked up: a head, and the body behind it.
"""

import re
from typing import Generic, TypeAlias, TypeVar

Headers: TypeAlias = list[tuple[bytes, bytes]]
Route = TypeVar("Route")

END = b"\r\n\r\n"
# Bounded, because callers choose their heads. The keys of the API are among the bytes, as in the buffers of the reads.
HEADS_MAX = 500
HEAD_MAX_BYTES = 2000
_length_of = re.compile(rb"\r\ncontent-length: ?([0-9]{1,9})\r\n", re.IGNORECASE).search


class KnownHead(Generic[Route]):
    """A head without its length: the route, the target, and the headers before and after `Content-Length`."""

    __slots__ = ("after", "before", "route", "target")

    def __init__(self, route: Route, target: bytes, before: Headers, after: Headers) -> None:
        self.route, self.target, self.before, self.after = route, target, before, after

    def headers(self, length: bytes) -> Headers:
        """Return the headers with a length, in the order in which they were sent."""
        return [*self.before, (b"content-length", length), *self.after]


class KnownHeads(Generic[Route]):
    """The known heads of one process, by their bytes without the length."""

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead[Route]] = {}

    def find(self, data: bytes) -> tuple[KnownHead[Route], bytes, bytes] | None:
        """Return the known head of a whole request, the length in digits, and the body; None if there is none."""
        end = data.find(END)
        found = _length_of(data, 0, end + 2) if end > 0 else None
        if found is None:
            return None
        first, last = found.span(1)
        head = self._heads.get(data[:first] + data[last:end])
        length = found[1]
        if head is None or len(data) - end - 4 != int(length):
            return None
        return head, length, data[end + 4 :]

    def note(self, data: bytes, route: Route, target: bytes, headers: Headers, body: bytes) -> None:
        """Remember the head of a whole request that the parser has read from `data`."""
        end = data.find(END)
        found = _length_of(data, 0, end + 2) if 0 < end < HEAD_MAX_BYTES else None
        # Equal bodies prove that the parser found the same end of the head.
        if found is None or data[end + 4 :] != body or int(found[1]) != len(body):
            return
        names = [name for name, _ in headers]
        # Each request has its own trace.
        if b"traceparent" in names or b"transfer-encoding" in names or b"upgrade" in names:
            return
        at = names.index(b"content-length")
        if headers[at][1] != found[1]:
            return
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        first, last = found.span(1)
        self._heads[data[:first] + data[last:end]] = KnownHead(route, target, headers[:at], headers[at + 1 :])
