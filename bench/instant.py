"""A coordinator that stores nothing and answers at once: `python -m bench.instant` prints its port."""

import asyncio
from typing import cast

import uvloop

from bench.receiver import END_OF_HEAD, length_of, listen

_ID = b"019a9f1c-1030-7b1e-8f00-1030a1030a10"
_HALF = (
    b'{"transaction_id":"%s","born_at":"2026-11-21T08:00:00.000000Z","first_check_at":"2026-11-21T08:00:06.000000Z",'
    b'"replayed":false,"messages":[{"message_id":"%s-0","topic":"order"}]}' % (_ID, _ID)
)
_END = (
    b'{"transaction_id":"%s","verdict":"commit","source":"producer","decided_at":"2026-11-21T08:00:01.000000Z",'
    b'"replayed":false,"messages":[{"message_id":"%s-0","topic":"order","offset":1030}]}' % (_ID, _ID)
)


def _answer(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


# As long as the answers of Halfnote.
_ANSWERS = {b"/half": _answer(b"201 Created", _HALF), b"/end": _answer(b"200 OK", _END)}


class Instant(asyncio.Protocol):
    """Answers the requests of one connection in turn."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(END_OF_HEAD)) >= 0:
            head = self._buffer[:end]
            whole = end + len(END_OF_HEAD) + length_of(head)
            if len(self._buffer) < whole:
                return
            self._buffer = self._buffer[whole:]
            self._transport.write(_ANSWERS[head.split(b" ", 2)[1]])


if __name__ == "__main__":
    uvloop.run(listen(Instant))
