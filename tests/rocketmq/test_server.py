"""`halfnote rocketmq`: its options, TLS, large and malformed requests, signals."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from app.rocketmq import server
from app.rocketmq.protocol.definition_pb2 import Resource
from app.rocketmq.protocol.service_pb2 import QueryRouteRequest, SendMessageRequest, SendMessageResponse
from app.rocketmq.service import SERVICE
from tests.support.certificates import Authority
from tests.support.cli_runs import Run, run_alone
from tests.support.gateway import LIMITS, WITHIN_S, GatewayProcess, RocketClient, codes_of, message_of, producer_of
from tests.support.ports import free_port
from tests.support.processes import ROOT

__all__ = ["run_alone"]

ROUNDS = 10

# The beginning of an HTTP/2 connection, and its first frame without settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway without a service, for several tests. It ends in order, and its log has no traceback."""
    gateway = GatewayProcess(tmp_path_factory.mktemp("gateway"), "http://127.0.0.1:9")
    await gateway.start()
    yield gateway
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.log.read_text()


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ModuleNotFoundError(\"No module named 'grpc'\", name='grpc')\n")
    ran = subprocess.run(
        [sys.executable, "-m", "app.cli", "rocketmq"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "pip install 'halfnote-server[rocketmq]'" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "x.pem", "--tls-key", "x.pem"], "cannot be used for TLS"),
        (["--credentials", "missing.yaml"], "missing.yaml cannot be read"),
    ],
)
def test_options_that_cannot_be_used_are_refused(arguments: list[str], said: str, run_alone: Run) -> None:
    refusal = run_alone("rocketmq", *arguments)
    assert (refusal.code, refusal.out) == (2, "")
    assert said in refusal.err


def test_an_empty_api_key_is_refused(run_alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_API_KEY", "")
    refusal = run_alone("rocketmq", "--port", "0")
    assert (refusal.code, "HALFNOTE_API_KEY is empty" in refusal.err) == (2, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_port_that_is_taken_is_said(standing: GatewayProcess) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "app.cli", "rocketmq", "--port", str(standing.port)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1, ran.stderr
    assert "cannot listen" in ran.stderr
    assert "Traceback" not in ran.stderr


async def test_it_starts_without_the_service_and_answers_that_it_is_away(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, f"http://127.0.0.1:{free_port()}")
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
            rocket = RocketClient(channel)
            request = SendMessageRequest(messages=[message_of("order", b"x")])
            answer = await rocket.call("SendMessage", request)
            assert codes_of([answer]) == ["PROXY_TIMEOUT"]
            # Above the limit of a body, but below that of a request: the client reads a status.
            giant = SendMessageRequest(messages=[message_of("order", b"x" * 4_000_000)])
            assert codes_of([await rocket.call("SendMessage", giant)]) == ["MESSAGE_BODY_TOO_LARGE"]
            beyond = SendMessageRequest(messages=[message_of("order", b"x" * 20_000_000)])
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rocket.call("SendMessage", beyond)
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            garbage = channel.unary_unary(f"/{SERVICE}/SendMessage", None, SendMessageResponse.FromString)
            answer = await garbage(b"\xff\xff\xff no message", metadata=rocket.metadata, timeout=30)
            assert codes_of([answer]) == ["BAD_REQUEST"]
            stream = channel.stream_stream(f"/{SERVICE}/Telemetry")(metadata=rocket.metadata)
            await stream.write(b"\xff\xff\xff no message")
            assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert codes_of([await rocket.call("SendMessage", request)]) == ["PROXY_TIMEOUT"]
    finally:
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.parametrize(("connections", "warned"), [("4096", True), ("100", False)])
async def test_the_limit_of_open_files_is_raised_and_a_low_one_is_said(
    tmp_path: Path, connections: str, warned: bool
) -> None:
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9", "--max-connections", connections)
    limited = 'ulimit -Sn 256 && ulimit -Hn 2000 && exec "$@"'
    gateway._command = ["bash", "-c", limited, "bash", *gateway._command]
    await gateway.start()
    try:
        assert gateway.process is not None
        assert resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE) == (2000, 2000)
        assert ("rocketmq_open_files_are_few" in gateway.log.read_text()) == warned
    finally:
        assert gateway.stop() == 0


def test_each_connection_may_have_a_stream_and_receives_and_one_all_of_its_streams() -> None:
    for connections in (1, 4096):
        calls = server._calls_max(replace(LIMITS, connections=connections))
        assert calls >= max(server.STREAMS_MAX, 8 * connections)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"\x00" * 4096,
        PREFACE + b"\xff" * 4096,
        # A frame of 16 MiB, and headers that never end.
        PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        PREFACE + SETTINGS + (b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + b"\x00" * 16_384) * 8,
    ],
    ids=["http 1", "tls", "zeros", "no frame", "giant frame", "continuation"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bytes_that_are_no_protocol_end_the_connection(content: bytes, standing: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", standing.port)
    writer.write(content)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    writer.close()
    async with grpc.aio.insecure_channel(standing.endpoint) as channel:
        assert await routed(channel) == "OK"


@pytest.mark.parametrize("content", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half a preface", "a preface"])
async def test_a_connection_that_does_not_speak_is_ended(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_MS", 500)
    await is_ended(content)


async def is_ended(content: bytes) -> None:
    """Connect to a server with the gateway's options, send this, and wait until the server ends the connection."""
    listening = server.grpc_server(LIMITS)
    port = listening.add_insecure_port("127.0.0.1:0")
    await listening.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    writer.close()
    await listening.stop(0)


@pytest.mark.parametrize(
    "content",
    # The length of a frame without the rest of it, and headers of which the last byte is missing.
    [b"", b"\x00\x10", b"\x00\x00\x04\x01\x04\x00\x00\x00\x01\x00\x01a"],
    ids=["nothing", "half a frame", "half of the headers"],
)
async def test_a_connection_without_a_call_is_ended(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_MS", 500)
    await is_ended(PREFACE + SETTINGS + content)


async def test_a_small_request_that_is_giant_uncompressed_is_refused(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9")
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
            rocket = RocketClient(channel)
            send = channel.unary_unary(f"/{SERVICE}/SendMessage", SendMessageRequest.SerializeToString)
            request = SendMessageRequest(messages=[message_of("order", bytes(40_000_000))])
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send(request, metadata=rocket.metadata, compression=grpc.Compression.Gzip, timeout=60)
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await routed(channel) == "OK"
    finally:
        assert gateway.stop() == 0


async def test_a_client_that_leaves_while_its_request_is_refused_leaves_no_traceback(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9")
    await gateway.start()
    request = SendMessageRequest(messages=[message_of("order", bytes(40_000_000))])
    try:
        # gRPC learns of the end of the call before or after the gateway answers it.
        for _ in range(ROUNDS):
            async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
                send = channel.unary_unary(f"/{SERVICE}/SendMessage", SendMessageRequest.SerializeToString)
                metadata = RocketClient(channel).metadata
                with pytest.raises(grpc.aio.AioRpcError):
                    await send(request, metadata=metadata, compression=grpc.Compression.Gzip, timeout=60)
        async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
            assert await routed(channel) == "OK"
    finally:
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log.read_text()


async def routed(channel: grpc.aio.Channel) -> str:
    request = QueryRouteRequest(topic=Resource(name="order"))
    request.endpoints.addresses.add(host="127.0.0.1", port=1)
    return codes_of([await RocketClient(channel).call("QueryRoute", request)])[0]


async def routed_by(gateway: GatewayProcess, authority: Authority) -> str:
    trusted = grpc.ssl_channel_credentials(authority.file.read_bytes())
    async with grpc.aio.secure_channel(gateway.endpoint, trusted) as channel:
        return await routed(channel)


async def test_tls_and_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    certificate, key = first.issue("127.0.0.1").write(tmp_path / "secret")
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9", "--tls-cert", str(certificate), "--tls-key", str(key))
    await gateway.start()
    try:
        assert await routed_by(gateway, first) == "OK"
        renewed = second.issue("127.0.0.1")
        certificate.write_bytes(renewed.certificate)
        # Between the two files the former pair serves.
        assert await routed_by(gateway, first) == "OK"
        key.write_bytes(renewed.key)
        assert await routed_by(gateway, second) == "OK"
        with pytest.raises(grpc.aio.AioRpcError):
            await routed_by(gateway, first)
        async with grpc.aio.insecure_channel(gateway.endpoint) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await routed(plain)
    finally:
        assert gateway.stop() == 0


async def test_a_signal_within_handshakes_and_probes_leaves_no_traceback(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "authority").issue("127.0.0.1").write(tmp_path / "secret")
    gateway = GatewayProcess(
        tmp_path,
        "http://127.0.0.1:9",
        *("--tls-cert", str(certificate), "--tls-key", str(key)),
        *("--remoting-port", "0", "--operations-port", "0"),
    )
    await gateway.start()
    begun = [
        await asyncio.open_connection("127.0.0.1", port)
        for port in (gateway.port, gateway.remoting_port, gateway.operations_port)
        for _ in range(3)
    ]
    try:
        for _, writer in begun:
            # The beginning of a record of TLS, or of a request.
            writer.write(b"\x16\x03\x01\x02")
        async with httpx.AsyncClient(trust_env=False) as operator, asyncio.timeout(WITHIN_S):
            wanted = 'halfnote_rocketmq_clients{protocol="remoting"} 3.0'
            while wanted not in (await operator.get(f"http://127.0.0.1:{gateway.operations_port}/metrics")).text:
                await asyncio.sleep(0.05)
    finally:
        assert gateway.stop() == 0
        for _, writer in begun:
            writer.close()
    assert "Traceback" not in gateway.log.read_text()


async def test_calls_without_a_request_leave_no_traceback_at_a_stop(tmp_path: Path) -> None:
    """The gateway waits for their requests until it stops; the clients have not left by then."""
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9")
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
            calls = []
            for name in ("Telemetry", "ReceiveMessage", "SendMessage"):
                method = channel.stream_stream(f"/{SERVICE}/{name}")
                calls += [method(metadata=RocketClient(channel).metadata) for _ in range(3)]
            reading = [asyncio.create_task(call.read()) for call in calls]
            # Answered on the same connection, so the calls have arrived.
            assert await routed(channel) == "OK"
            assert await asyncio.to_thread(gateway.stop) == 0
            await asyncio.wait(reading)
            for one in reading:
                one.exception()
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log.read_text()


async def test_streams_that_another_one_replaced_end_at_a_stop(tmp_path: Path) -> None:
    """So do calls that begin within the drain."""
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9", "--drain-s", "30")
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
            rocket = RocketClient(channel)
            streams = [(await rocket.connect(producer_of("order")))[0] for _ in range(2)]
            calls = []
            stopped = asyncio.create_task(asyncio.to_thread(gateway.stop))
            begun = time.monotonic()
            while not stopped.done():
                calls.append(channel.stream_stream(f"/{SERVICE}/Telemetry")(metadata=rocket.metadata))
                await asyncio.sleep(0.01)
            assert await stopped == 0
            assert time.monotonic() - begun < 25
            for call in (*streams, *calls):
                call.cancel()
    finally:
        gateway.stop()
    assert "Traceback" not in gateway.log.read_text()


async def test_a_hangup_answers_calls_in_flight(tmp_path: Path) -> None:
    """A closed terminal ends the gateway as SIGTERM does."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be a service whose answers take as long as the test wants."""
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await answer.wait()
        writer.write(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as service:
        url = f"http://127.0.0.1:{service.sockets[0].getsockname()[1]}"
        gateway = GatewayProcess(tmp_path, url, "--operations-port", "0")
        await gateway.start()
        try:
            assert gateway.process is not None
            async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
                request = SendMessageRequest(messages=[message_of("order", b"x")])
                call = asyncio.create_task(RocketClient(channel).call("SendMessage", request))
                await asked.wait()
                gateway.process.send_signal(signal.SIGHUP)
                await until_draining(gateway)
                # The shell and the kernel may each send it.
                gateway.process.send_signal(signal.SIGHUP)
                answer.set()
                assert codes_of([await call]) == ["PROXY_TIMEOUT"]
            assert await asyncio.to_thread(gateway.process.wait, 60) == 0
        finally:
            answer.set()
            gateway.stop()
    assert "Traceback" not in gateway.log.read_text()


async def until_draining(gateway: GatewayProcess) -> None:
    """Wait until a gateway says that it ends."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.operations_port}", trust_env=False) as probe:
        async with asyncio.timeout(60):
            while (await probe.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
