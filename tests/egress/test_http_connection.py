"""One HTTP/1.1 connection on a transport that is a double: what it keeps, and when it is closed."""

import asyncio

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.egress.http_connection import Answer, HttpConnection

OK = b"HTTP/1.1 204 No Content\r\n\r\n"


class Recorder(asyncio.Transport):
    """A transport that keeps whether it was closed. `unsent`: the bytes that the receiver does not read."""

    def __init__(self, unsent: int = 0) -> None:
        super().__init__()
        self.aborted = False
        self.unsent = unsent

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        """Wait, as for a receiver's alert of TLS, or for its reading."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def idle() -> list[HttpConnection]:
    return []


@pytest.fixture
def connection(idle: list[HttpConnection]) -> HttpConnection:
    return HttpConnection(idle.append, lambda _: None)


async def answered(connection: HttpConnection) -> None:
    call = asyncio.create_task(connection.exchange(b"", b"", asyncio.get_running_loop().time() + 60))
    await asyncio.sleep(0)
    connection.data_received(OK)
    assert (await call).status == 204


@pytest.mark.parametrize("unsent", [0, 1])
async def test_a_connection_whose_receiver_does_not_read_is_not_used_again(
    connection: HttpConnection, idle: list[HttpConnection], unsent: int
) -> None:
    """Else each answer would let another request wait in memory."""
    transport = Recorder(unsent)
    connection.connection_made(transport)
    await answered(connection)
    assert (idle, transport.aborted) == (([], True) if unsent else ([connection], False))


async def test_an_idle_connection_is_closed_without_waiting_for_the_receiver(connection: HttpConnection) -> None:
    transport = Recorder()
    connection.connection_made(transport)
    await answered(connection)
    connection.close()
    assert transport.aborted


async def test_data_before_tls_has_its_transport_closes_the_connection(connection: HttpConnection) -> None:
    """So it is with TLS in a proxy's tunnel."""
    connection.data_received(OK)
    transport = Recorder()
    connection.attach(transport)
    assert transport.aborted
    with pytest.raises(ConnectionError):
        await connection.exchange(b"", b"", asyncio.get_running_loop().time() + 60)


NAMES = st.from_regex(r"x-[a-z]{1,10}", fullmatch=True)
VALUES = st.from_regex(r"[!-~]([ -~]{0,30}[!-~])?", fullmatch=True)


@given(
    status=st.integers(200, 599).filter(lambda status: status not in (204, 304)),
    headers=st.dictionaries(NAMES, VALUES, max_size=10),
    pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=5),
    chunked=st.booleans(),
    cuts=st.lists(st.integers(1, 2000), max_size=20),
)
async def test_an_answer_in_any_parts_is_the_one_that_was_sent(
    status: int, headers: dict[str, str], pieces: list[bytes], chunked: bool, cuts: list[int]
) -> None:
    """h11 writes the answers."""
    body = b"".join(pieces)
    framing = ("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body)))
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"POST / HTTP/1.1\r\nhost: shop\r\ncontent-length: 0\r\n\r\n")
    while not isinstance(server.next_event(), h11.EndOfMessage):
        pass
    sent = server.send(h11.Response(status_code=status, headers=[*headers.items(), framing])) or b""
    for piece in pieces:
        sent += server.send(h11.Data(data=piece)) or b""
    sent += server.send(h11.EndOfMessage()) or b""

    idle: list[HttpConnection] = []
    connection = HttpConnection(idle.append, lambda _: None)
    transport = Recorder()
    connection.connection_made(transport)
    for _ in range(2):
        call = asyncio.create_task(connection.exchange(b"", b"", asyncio.get_running_loop().time() + 60))
        await asyncio.sleep(0)
        start = 0
        for end in [*sorted({cut for cut in cuts if cut < len(sent)}), len(sent)]:
            connection.data_received(sent[start:end])
            start = end
        assert await call == Answer(status, {**headers, framing[0]: framing[1]}, body, False)
    assert idle == [connection, connection]
    assert not transport.aborted
