"""A DNS server on a real UDP socket, whose answers a test chooses and may change from one question to the next."""

import asyncio
import ipaddress
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType

A, CNAME, AAAA = 1, 5, 28
# Questions about names below this one get no answer.
SILENT = ".silent.test"
# The answers to successive questions of a name; the last one answers all later questions. Each is a list of addresses.
Answers = Mapping[str, Sequence[Sequence[str]]]


class NameServer(asyncio.DatagramProtocol):
    """Answers A and AAAA by `answers`, with no time to live; other names do not exist.

    `asked` counts the questions by name and type.
    """

    def __init__(self, answers: Answers, address: str = "127.0.0.1", port: int = 0) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self._answers, self._at = answers, (address, port)

    async def __aenter__(self) -> "NameServer":
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=self._at)
        self.port: int = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, kind, end = _question(data)
        rounds = self._answers.get(name)
        found = [] if rounds is None else rounds[min(self.asked[name, kind], len(rounds) - 1)]
        self.asked[name, kind] += 1
        if name.endswith(SILENT):
            return
        records = [_record(answer, kind) for answer in found]
        encoded = b"".join(record for record in records if record is not None)
        count = sum(record is not None for record in records)
        flags = 0x8180 | (0 if rounds is not None else 3)
        self._transport.sendto(data[:2] + struct.pack("!HHHHH", flags, 1, count, 0, 0) + data[12:end] + encoded, addr)


async def ask(port: int, name: str, kind: int) -> list[str]:
    """Query the server at a port of 127.0.0.1, as a resolver does; return the addresses."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[bytes] = loop.create_future()

    class Query(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            answered.set_result(data)

    transport, _ = await loop.create_datagram_endpoint(Query, remote_addr=("127.0.0.1", port))
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
    transport.sendto(struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!HH", kind, 1))
    data = await answered
    transport.close()
    at, found = _question(data)[2], []
    while at < len(data):
        length: int = struct.unpack_from("!H", data, at + 10)[0]
        found.append(str(ipaddress.ip_address(data[at + 12 : at + 12 + length])))
        at += 12 + length
    return found


def _question(data: bytes) -> tuple[str, int, int]:
    """Return a message's question, its type, and where it ends."""
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode())
        at += 1 + data[at]
    return ".".join(labels).lower(), struct.unpack_from("!H", data, at + 1)[0], at + 5


def _record(answer: str, kind: int) -> bytes | None:
    """Return an address as a record of the name that was asked for; None if it has the other type."""
    packed = ipaddress.ip_address(answer).packed
    if len(packed) != {A: 4, AAAA: 16}.get(kind):
        return None
    return struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(packed)) + packed
