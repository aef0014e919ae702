"""`halfnote rocketmq --drain-s`: how long calls of both protocols may be answered after SIGTERM."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import annotated_types
import grpc
import grpc.aio
import httpx
import pytest

from app.cli import rocketmq
from app.config import Settings
from app.rocketmq.protocol.service_pb2 import SendMessageRequest
from app.rocketmq.server import IDLE_LOOKS, LOOK_S, drain
from tests.support.cli_runs import Run, run_alone
from tests.support.gateway import WITHIN_S, GatewayProcess, RocketClient, codes_of, gateway_over, message_of
from tests.support.remoting import RemotingPeer

__all__ = ["run_alone"]

# The time that gateways had before there was an option.
FORMER_S = 5.0


class SlowService:
    """A service that answers a call when the test says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.answers = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one call."""
        await reader.readuntil(b"\r\n\r\n")
        self.asked.release()
        await self.answers.wait()
        writer.write(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()


@asynccontextmanager
async def slow_service() -> AsyncIterator[SlowService]:
    """Run a slow service."""
    service = SlowService()
    async with await asyncio.start_server(service.serve, "127.0.0.1", 0) as server:
        service.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield service
        finally:
            service.answers.set()


@asynccontextmanager
async def two_sends(gateway: GatewayProcess, service: SlowService) -> AsyncIterator[list["asyncio.Task[object]"]]:
    """Send over gRPC and over remoting; yield both calls when the service has been asked for both."""
    peer = await RemotingPeer.connect(gateway.remoting_port)
    async with grpc.aio.insecure_channel(gateway.endpoint) as channel:
        request = SendMessageRequest(messages=[message_of("order", b"x")])
        calls: list[asyncio.Task[object]] = [
            asyncio.create_task(RocketClient(channel).call("SendMessage", request)),
            asyncio.create_task(peer.send(b"x")),
        ]
        try:
            async with asyncio.timeout(WITHIN_S):
                for _ in calls:
                    await service.asked.acquire()
            yield calls
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await peer.close()


async def test_calls_of_both_protocols_are_answered_during_the_drain(tmp_path: Path) -> None:
    async with slow_service() as service:
        gateway = GatewayProcess(tmp_path, service.url, "--remoting-port", "0", "--drain-s", "50")
        await gateway.start()
        assert gateway.process is not None
        try:
            async with two_sends(gateway, service) as calls:
                gateway.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(FORMER_S + 1.5)
                assert not any(call.done() for call in calls)
                service.answers.set()
                by_grpc, by_remoting = await asyncio.gather(*calls)
                assert codes_of([by_grpc]) == ["PROXY_TIMEOUT"]
                assert by_remoting is not None
            assert await asyncio.to_thread(gateway.process.wait, WITHIN_S) == 0
        finally:
            gateway.stop()
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.parametrize("by_environment", [False, True])
async def test_a_gateway_ends_after_its_drain(tmp_path: Path, by_environment: bool) -> None:
    drain_s = 2.0
    arguments = () if by_environment else ("--drain-s", str(drain_s))
    environment = {"HALFNOTE_DRAIN_S": str(drain_s)} if by_environment else {}
    async with slow_service() as service:
        gateway = GatewayProcess(tmp_path, service.url, "--remoting-port", "0", *arguments, **environment)
        await gateway.start()
        assert gateway.process is not None
        try:
            async with two_sends(gateway, service):
                begun = time.monotonic()
                gateway.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(gateway.process.wait, WITHIN_S) == 0
                # Both protocols drain at the same time, and what still waits for the service is given up.
                assert drain_s <= time.monotonic() - begun < drain_s + FORMER_S
        finally:
            gateway.stop()
    assert "Traceback" not in gateway.log.read_text()


def sockets_of(pid: int) -> int:
    """Return how many sockets a process has open."""
    number = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            number += os.readlink(one).startswith("socket:")
    return number


async def test_a_gateway_ends_after_its_drain_for_a_remoting_client_that_left_before(tmp_path: Path) -> None:
    """What this one sent still waits for the service, which may answer it until then."""
    drain_s = 1.0
    async with slow_service() as service:
        gateway = GatewayProcess(tmp_path, service.url, "--remoting-port", "0", "--drain-s", str(drain_s))
        await gateway.start()
        assert gateway.process is not None
        try:
            peer = await RemotingPeer.connect(gateway.remoting_port)
            sending = asyncio.create_task(peer.send(b"x"))
            async with asyncio.timeout(WITHIN_S):
                await service.asked.acquire()
                open_before = sockets_of(gateway.process.pid)
                await peer.close()
                while sockets_of(gateway.process.pid) >= open_before:
                    await asyncio.sleep(0.01)
            begun = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.process.wait, WITHIN_S) == 0
            # It would wait for the service for 10 s.
            assert drain_s <= time.monotonic() - begun < drain_s + FORMER_S
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        finally:
            gateway.stop()
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "86401"])
def test_the_option_has_the_limits_of_the_setting(value: str, run_alone: Run) -> None:
    with pytest.raises(ValueError, match="drain_s"):
        Settings.model_validate({"database_url": "postgresql://h/d", "drain_s": value})
    refusal = run_alone("rocketmq", "--drain-s", value)
    assert (refusal.code, "--drain-s" in refusal.err) == (2, True)


async def test_a_call_that_no_handler_got_does_not_hold_up_a_stop() -> None:
    """Here a handler has it of which the gateway knows nothing."""
    begun = asyncio.Event()

    async def hold(request: object, context: object) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    handlers = {"Held": grpc.unary_unary_rpc_method_handler(hold)}
    async with gateway_over(None) as (gateway, channel):
        gateway.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        call = asyncio.ensure_future(channel.unary_unary("/test/Held")(b""))
        async with asyncio.timeout(WITHIN_S):
            await begun.wait()
        stopped_at = time.monotonic()
        await drain(gateway.server, gateway.service, 40)
        assert time.monotonic() - stopped_at < 20
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_stop_waits_for_a_call_beside_one_that_no_handler_got() -> None:
    """Longer than for the other one."""
    begun = asyncio.Event()

    async def answer_late(request: httpx.Request) -> httpx.Response:
        begun.set()
        await asyncio.sleep(LOOK_S * IDLE_LOOKS + 2)
        return httpx.Response(503)

    async def hold(request: object, context: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    handlers = {"Held": grpc.unary_unary_rpc_method_handler(hold)}
    async with gateway_over(httpx.MockTransport(answer_late)) as (gateway, channel):
        gateway.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        held = asyncio.ensure_future(channel.unary_unary("/test/Held")(b""))
        request = SendMessageRequest(messages=[message_of("order", b"x")])
        sent = asyncio.ensure_future(RocketClient(channel).call("SendMessage", request))
        async with asyncio.timeout(WITHIN_S):
            await begun.wait()
        await drain(gateway.server, gateway.service, 60)
        assert codes_of([await sent]) == ["PROXY_TIMEOUT"]
        with pytest.raises(grpc.aio.AioRpcError):
            await held


def test_the_option_has_the_default_of_the_setting() -> None:
    setting = Settings.model_fields["drain_s"]
    [most] = [one.le for one in setting.metadata if isinstance(one, annotated_types.Le)]
    assert (setting.default, most) == (rocketmq.DRAIN_S, rocketmq.LONGEST_DRAIN_S)
