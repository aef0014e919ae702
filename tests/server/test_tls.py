"""`halfnote serve` with a certificate of its own: framing is as without TLS, and a new pair needs no restart."""

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from cryptography import x509
from halfnote import Outgoing, SyncTransactionProducer, TransactionProducer
from halfnote.tls import trusted

from app.cli.api_client import call
from app.cli.errors import Refusal
from app.database.connection import Connection
from tests.conftest import shares
from tests.server.raw_forms import OK, Form, Route, raw_forms
from tests.server.raw_http import PROBE, converse, last_words, read_answer
from tests.support.certificates import Authority, Pair, client_hello
from tests.support.processes import Service

TOPIC = "raw"
BODY = json.dumps({"producer_group": "shop", "messages": [{"topic": TOPIC, "body": {"n": 1}}]}).encode()
ROUTE = Route(b"POST", b"/messages", BODY)
# The framing is tested without TLS, form by form. These are the kinds that a transport could change.
KINDS = ("ordinary", "pipelining", "upgrade")


class Secret:
    """A mounted Secret: a kubelet writes a new directory, and then replaces one symbolic link."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.certificate, self.key = directory / "tls.crt", directory / "tls.key"

    def mount(self, pair: Pair) -> None:
        """Replace the content."""
        self._count += 1
        pair.write(self._directory / f"..{self._count}")
        link = self._directory / "..new"
        link.symlink_to(f"..{self._count}")
        link.rename(self._directory / "..data")
        for path in (self.certificate, self.key):
            if not path.is_symlink():
                path.symlink_to(f"..data/{path.name}")


class Served:
    """A service with TLS, its Secret, and who issued its certificate."""

    def __init__(self, service: Service, secret: Secret, authority: Authority) -> None:
        self.service, self.secret, self.authority = service, secret, authority
        self.context = authority.client_context()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.service.port, ssl=self.context)

    async def mount(self) -> Pair:
        """Mount a new pair, and wait until a new connection gets it."""
        pair = self.authority.issue("127.0.0.1")
        self.secret.mount(pair)
        await self.until_serial(pair.serial)
        return pair

    async def until_serial(self, serial: int) -> None:
        async with asyncio.timeout(20):
            while await self.serial() != serial:
                await asyncio.sleep(0.02)

    async def serial(self) -> int:
        """Return the serial number that a new connection gets."""
        _, writer = await self.connect()
        found = serial_of(writer)
        await closed(writer)
        return found

    async def readyz(self) -> dict[str, object]:
        async with self.client() as client:
            found: dict[str, object] = (await client.get("/readyz")).json()
            return found

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.service.url, verify=self.context, timeout=20)


def serial_of(writer: asyncio.StreamWriter) -> int:
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(der).serial_number


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def started(directory: Path, dsn: str, *arguments: str) -> Served:
    authority, secret = Authority(directory / "ca"), Secret(directory / "secret")
    secret.mount(authority.issue("127.0.0.1"))
    env = {
        "HALFNOTE_TLS_CERT": str(secret.certificate),
        "HALFNOTE_TLS_KEY": str(secret.key),
        "HALFNOTE_TLS_RELOAD_S": "0.05",
    }
    service = Service(directory / "data", "serve", *arguments, HALFNOTE_DATABASE_URL=dsn, **env)
    await service.start()
    return Served(service, secret, authority)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    shared_dsn: str, shared_db: Connection, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """A service over the module's database, to which `shared_db` has added the group."""
    served = await started(tmp_path_factory.mktemp("tls"), shared_dsn)
    yield served
    served.service.stop()


async def outcome(served: Served, db: Connection, form: Form) -> tuple[list[int], int]:
    """Send a form; return the statuses of the answers and the number of committed messages."""
    counted = "select count(*) from outbox where topic = $1"
    before = await db.fetchval(counted, TOPIC)
    # A connection that is to be closed stays open for a while, so that the answer arrives.
    open_after = True if form.is_open else None
    answers = await converse(
        served.service.port, form.pieces, len(form.statuses), open_after=open_after, tls=served.context
    )
    statuses = [OK if answer.status < 300 else answer.status for answer in answers]
    return statuses, await db.fetchval(counted, TOPIC) - before


@shares
@pytest.mark.parametrize("kind", KINDS)
async def test_forms_over_tls(served: Served, shared_db: Connection, kind: str) -> None:
    forms = [form for form in raw_forms(ROUTE) if form.kind == kind]
    found = {form.name: await outcome(served, shared_db, form) for form in forms}
    assert found == {form.name: ([*form.statuses, *([OK] if form.is_open else [])], form.effects) for form in forms}


@shares
async def test_a_new_pair_is_used_without_a_restart(served: Served) -> None:
    """Open connections continue; a pair that does not fit changes nothing but a warning and a metric."""
    reader, writer = await served.connect()
    first = serial_of(writer)
    mounted = await served.mount()
    assert first != mounted.serial

    async def expect_open_connection() -> None:
        writer.write(PROBE)
        answer = await read_answer(reader)
        assert answer is not None
        assert answer.status == 200
        assert serial_of(writer) == first

    await expect_open_connection()
    other = served.authority.issue("127.0.0.1")
    served.secret.mount(Pair(other.certificate, mounted.key, other.serial))
    found = await until(served, lambda answer: "tls_certificate" in str(answer["warnings"]))
    assert "does not belong to the first certificate" in str(found["warnings"])
    assert found["status"] == "ready"
    assert await metric(served, "tls_certificate_not_reloaded") == 1
    assert await served.serial() == mounted.serial
    # Deleted for a moment, as by who writes in place.
    served.secret.key.rename(served.secret.key.with_name("away"))
    await until(served, lambda answer: "cannot be read" in str(answer["warnings"]))
    assert await served.serial() == mounted.serial
    await expect_open_connection()
    served.secret.key.with_name("away").rename(served.secret.key)
    # The key still does not fit.
    await until(served, lambda answer: "does not belong" in str(answer["warnings"]))
    last = await served.mount()
    await until(served, lambda answer: "tls_certificate" not in str(answer["warnings"]))
    assert await metric(served, "tls_certificate_not_reloaded") == 0
    expires = x509.load_pem_x509_certificate(last.certificate).not_valid_after_utc.timestamp()
    assert await metric(served, "tls_certificate_expires_timestamp_seconds") == expires
    await expect_open_connection()
    await closed(writer)
    events = [json.loads(line) for line in served.service.log.read_text().splitlines() if line.startswith("{")]
    refused = [line for line in events if line["event"] == "tls_certificate_not_reloaded"]
    # Once for each fault, not at each turn.
    assert [line["level"] for line in refused] == ["error"] * 3


async def until(served: Served, holds: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    """Return the answer of `readyz` once it is as expected. It is up to a second old."""
    async with asyncio.timeout(20):
        while not holds(answer := await served.readyz()):
            await asyncio.sleep(0.05)
        return answer


async def metric(served: Served, name: str) -> float:
    async with served.client() as client:
        text = (await client.get("/metrics")).text
    [value] = re.findall(rf"^halfnote_{name}\{{.*\}} (.+)$", text, re.MULTILINE)
    return float(value)


@shares
async def test_clients_that_end_in_other_ways(served: Served) -> None:
    """Without TLS's alert, by a reset, with plain HTTP, in the middle of a handshake: none is an error in the log."""
    port = served.service.port
    for ending in ("alert", "no alert", "reset"):
        _, writer = await served.connect()
        writer.write(ROUTE.plain()[:-3])
        await writer.drain()
        if ending == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        if ending == "alert":
            await closed(writer)
        else:
            writer.transport.abort()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PROBE)
    # The alert of the refused handshake at most.
    assert b"HTTP" not in await last_words(reader)
    await closed(writer)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(client_hello())
    writer.transport.abort()
    async with served.client() as client:
        assert (await client.get("/livez")).status_code == 200
    for line in served.service.log.read_text().splitlines():
        assert "Traceback" not in line, line
        assert "SSL error" not in line, line


@shares
async def test_versions_and_protocols(served: Served) -> None:
    old = served.authority.client_context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", served.service.port, ssl=old)
    # Java's client and curl offer HTTP/2 by ALPN.
    offering = served.authority.client_context()
    offering.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", served.service.port, ssl=offering)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    await closed(writer)


@shares
async def test_the_command_and_the_client_trust_a_private_ca(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = served.service.url

    def ready(url: str = url) -> object:
        return call(url, "GET", "/readyz")["status"]

    async def send(url: str) -> None:
        """By aiohttp, then by httpx."""
        async with TransactionProducer(url, group="shop") as producer:
            await producer.send_plain(Outgoing(TOPIC, {"n": 1}))
        transport = httpx.AsyncHTTPTransport(verify=trusted(url))
        async with TransactionProducer(url, group="shop", transport=transport) as producer:
            await producer.send_plain(Outgoing(TOPIC, {"n": 1}))

    def send_in_thread(url: str) -> None:
        with SyncTransactionProducer(url, group="shop") as producer:
            producer.send_plain(Outgoing(TOPIC, {"n": 1}))

    with pytest.raises(Refusal, match="HALFNOTE_CA_FILE"):
        await asyncio.to_thread(ready)
    monkeypatch.setenv("HALFNOTE_CA_FILE", str(served.authority.file))
    # The case of a scheme has no meaning.
    for one in (url, url.replace("https", "HTTPS")):
        assert await asyncio.to_thread(ready, one) == "ready"
        await send(one)
        await asyncio.to_thread(send_in_thread, one)
    monkeypatch.setenv("HALFNOTE_CA_FILE", str(tmp_path / "missing"))
    with pytest.raises(Refusal, match="is no readable PEM file of CAs: No such file"):
        await asyncio.to_thread(ready)
    with pytest.raises(ValueError, match="is no readable PEM file of CAs: No such file"):
        trusted(url)


@shares
async def test_a_refused_client_that_still_sends_gets_the_answer(served: Served) -> None:
    reader, writer = await served.connect()
    # More than the socket buffers hold, so that the server has unread bytes when it refuses.
    writer.write(b"GET /livez HTTP/1.1\r\nX-Fill: " + b"f" * 20_000_000)
    answer = await read_answer(reader)
    assert answer is not None
    assert answer.status == 431
    # The alert arrives too: for TLS the end is no truncation.
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    await closed(writer)


@pytest.mark.slow
async def test_each_of_several_processes_gets_the_new_pair(dsn: str, tmp_path: Path) -> None:
    served = await started(tmp_path, dsn, "--workers", "2")
    try:
        pair = await served.mount()
        async with asyncio.timeout(30):
            while {await served.serial() for _ in range(20)} != {pair.serial}:
                await asyncio.sleep(0.02)
        await served.service.until_ready()
    finally:
        served.service.stop()
