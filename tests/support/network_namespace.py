"""A network namespace where every address is local, so that every connection attempt is recorded.

Run `python -m tests.support.network_namespace` by `unshare -Urnm`. It reads URLs and writes for each, as JSON, the
error of Halfnote and the addresses that it connected to: with the default rules, and with every network opened. The C
library resolves names from a DNS server on port 53. Hosts of brokers are tried in the same way.
"""

import asyncio
import contextlib
import fcntl
import json
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.config import DENIED_PORTS
from app.delivery import Failed
from app.destinations import kafka, nats, rabbitmq, redis
from app.egress.denied_addresses import METADATA
from app.egress.http_client import callback_client
from app.egress.network_policy import NetworkPolicy
from tests.support.deliveries import NOW, delivery
from tests.support.dns_server import Answers, NameServer
from tests.support.webhooks import networks_of

PUBLIC = "8.8.8.8"
BROKERS = {"rabbitmq": rabbitmq.of, "nats": nats.of, "kafka": kafka.of, "redis": redis.of}
NAMES: Answers = {
    "loopback.test": [["127.0.0.1"]],
    "private.test": [["10.0.0.5"]],
    "metadata.test": [["169.254.169.254"]],
    "six.test": [["::1"]],
    "mapped.test": [["::ffff:10.0.0.5"]],
    "nat64.test": [["64:ff9b::7f00:1"]],
    # First a public address, then an internal one.
    "rebind.test": [[PUBLIC], ["127.0.0.1"]],
    **{f"rebind-{kind}.test": [[PUBLIC], ["127.0.0.1"]] for kind in BROKERS},
}
CLOSED = NetworkPolicy(denied_ports=frozenset(DENIED_PORTS))
OPENED = NetworkPolicy(opened=networks_of("0.0.0.0/0", "::/0", *(address for address, _ in METADATA)))
TIMEOUT_S = 5.0

SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41
# Constants of rtnetlink, for a route that makes every address of a family local to an interface.
NEW_ROUTE, ASKED_ACKNOWLEDGED_CREATED = 24, 0x1 | 0x4 | 0x400
LOCAL_TABLE, BY_BOOT, HOST_SCOPE, LOCAL_ROUTE, OUT_INTERFACE, LOOPBACK_INTERFACE = 255, 3, 254, 2, 4, 1


def make_every_address_local() -> None:
    """Set the loopback interface up and assign every address to it. Raises OSError."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            route = struct.pack("BBBBBBBBI", family, 0, 0, 0, LOCAL_TABLE, BY_BOOT, HOST_SCOPE, LOCAL_ROUTE, 0)
            route += struct.pack("HHI", 8, OUT_INTERFACE, LOOPBACK_INTERFACE)
            kernel.send(struct.pack("IHHII", 16 + len(route), NEW_ROUTE, ASKED_ACKNOWLEDGED_CREATED, 1, 0) + route)
            [fault] = struct.unpack("i", kernel.recv(4096)[16:20])
            if fault:
                raise OSError(-fault, "no route could be made")


def resolve_here(directory: Path, options: str = "") -> None:
    """Make the C library resolve names by 127.0.0.1, and by files only `localhost`. `options`: of resolv.conf."""
    files = {
        "resolv.conf": f"nameserver 127.0.0.1\noptions {options}\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "hosts: files dns\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
        subprocess.run(["mount", "--bind", directory / name, f"/etc/{name}"], check=True)


@dataclass
class Listener:
    """A server on every address; `reached` are those that were connected to. It answers HTTP unless it is `mute`."""

    reached: list[str] = field(default_factory=list)
    port: int = 0
    mute: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Record the address, and answer 204 or a redirect to 127.0.0.1."""
        self.reached.append(writer.get_extra_info("sockname")[0].removeprefix("::ffff:"))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = b"" if self.mute else await reader.readuntil(b"\r\n\r\n")
            moved = (
                f"302 Found\r\nlocation: http://127.0.0.1:{self.port}/inside" if b"/redirect" in head else "204 None"
            )
            if head:
                writer.write(f"HTTP/1.1 {moved}\r\nconnection: close\r\n\r\n".encode())
                await writer.drain()
        writer.close()

    def take_reached(self) -> list[str]:
        """Return the addresses reached since the last call, without the public one."""
        reached, self.reached = self.reached, []
        return [address for address in reached if address != PUBLIC]


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    """Listen on every address, IPv4 included, on a port that the kernel chooses."""
    listener = Listener()
    server = await asyncio.start_server(
        listener.serve, sock=socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    )
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()
        await server.wait_closed()


async def error_of_call(url: str, policy: NetworkPolicy) -> str:
    """POST to a URL with a new client, twice if the second lookup returns another address; return the error."""
    for _ in range(2 if "rebind" in url else 1):
        # New rules remember no addresses.
        async with callback_client(replace(policy)) as client:
            reply = await client.call(url, b"{}", {}, timeout_s=TIMEOUT_S)
    return reply.error or f"answered {reply.status}"


async def error_of_delivery(kind: str, host: str, port: int, policy: NetworkPolicy) -> str:
    """Deliver to a broker at a host, twice if the second lookup returns another address; return the error."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme = {"rabbitmq": "amqp"}.get(kind, kind)
    stored = {"type": kind, "bootstrap": [at]} if kind == "kafka" else {"type": kind, "url": f"{scheme}://{at}"}
    destination = BROKERS[kind](stored, {}, TIMEOUT_S, policy)
    try:
        for _ in range(2 if "rebind" in host else 1):
            [outcome] = await destination.deliver([delivery()], NOW)
    finally:
        await destination.close()
    assert isinstance(outcome, Failed)
    return outcome.error


async def try_all(urls: list[str], hosts: list[str]) -> dict[str, list[dict[str, object]]]:
    """Return the results of all URLs, and of each kind of broker at all hosts."""
    found: dict[str, list[dict[str, object]]] = {"urls": [], "brokers": []}
    async with NameServer(NAMES, port=53), listening() as listener:
        for url in urls:
            local_url = url.replace("PORT", str(listener.port))
            error, reached = await error_of_call(local_url, CLOSED), listener.take_reached()
            await error_of_call(local_url, OPENED)
            found["urls"].append({"url": url, "error": error, "reached": reached, "opened": listener.take_reached()})
        listener.mute = True
        for kind in BROKERS:
            for host in [*hosts, f"rebind-{kind}.test"]:
                error, reached = await error_of_delivery(kind, host, listener.port, CLOSED), listener.take_reached()
                found["brokers"].append({"kind": kind, "host": host, "error": error, "reached": reached})
    return found


if __name__ == "__main__":
    make_every_address_local()
    with tempfile.TemporaryDirectory() as directory:
        resolve_here(Path(directory))
        request = json.load(sys.stdin)
        print(json.dumps(asyncio.run(try_all(request["urls"], request["hosts"]))))
