"""A network of its own, where every address is this machine's: every connection attempt there is seen.

`python -m tests.support.network_namespace` is to be run by `unshare -Urnm`. It takes URLs and says for each, as JSON,
what Halfnote said
to it and which addresses were connected to: with the rules as they are, and with every network opened. Names are
resolved by the C library, from a DNS server on port 53. Brokers are reached in the same way.
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
from dataclasses import dataclass, field
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
    # First where everybody may go, then inside.
    "rebind.test": [[PUBLIC], ["127.0.0.1"]],
    **{f"rebind-{kind}.test": [[PUBLIC], ["127.0.0.1"]] for kind in BROKERS},
}
CLOSED = NetworkPolicy(denied_ports=frozenset(DENIED_PORTS))
OPENED = NetworkPolicy(opened=networks_of("0.0.0.0/0", "::/0", *(address for address, _ in METADATA)))
TIMEOUT_S = 5.0

SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41
# Of rtnetlink: what makes every address of a family local to an interface.
NEW_ROUTE, ASKED_ACKNOWLEDGED_CREATED = 24, 0x1 | 0x4 | 0x400
LOCAL_TABLE, BY_BOOT, HOST_SCOPE, LOCAL_ROUTE, OUT_INTERFACE, LOOPBACK_INTERFACE = 255, 3, 254, 2, 4, 1


def settle() -> None:
    """Set the loopback interface up, and give it every address there is. Raises OSError."""
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


def resolve_here(directory: Path) -> None:
    """Have the C library ask 127.0.0.1 for names, and know of none by files but `localhost`."""
    files = {
        "resolv.conf": "nameserver 127.0.0.1\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "hosts: files dns\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
        subprocess.run(["mount", "--bind", directory / name, f"/etc/{name}"], check=True)


@dataclass
class Listener:
    """A server on every address: `reached` are those that were connected to. Unless it is `mute` it answers HTTP."""

    reached: list[str] = field(default_factory=list)
    port: int = 0
    mute: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note the address, and answer 204, or a redirect to this machine's own."""
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

    def taken(self) -> list[str]:
        """Return what was reached since the last call, but for the address where everybody may go."""
        reached, self.reached = self.reached, []
        return [address for address in reached if address != PUBLIC]


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    """Listen on every address, IPv4's as well, on a port of the kernel's choice."""
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


async def called(url: str, policy: NetworkPolicy) -> str:
    """POST to a URL by a client of its own, twice if the name leads elsewhere the second time; return what it said."""
    for _ in range(2 if "rebind" in url else 1):
        async with callback_client(policy) as client:
            reply = await client.call(url, b"{}", {}, timeout_s=TIMEOUT_S)
    return reply.error or f"answered {reply.status}"


async def sent(kind: str, host: str, port: int, policy: NetworkPolicy) -> str:
    """Deliver to a broker at a host, twice if the name leads elsewhere the second time; return what was wrong."""
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


async def tried(urls: list[str], hosts: list[str]) -> dict[str, list[dict[str, object]]]:
    """Return the results of all URLs, and of each kind of broker at all hosts."""
    found: dict[str, list[dict[str, object]]] = {"urls": [], "brokers": []}
    async with NameServer(NAMES, port=53), listening() as listener:
        for url in urls:
            here = url.replace("PORT", str(listener.port))
            said, kept = await called(here, CLOSED), listener.taken()
            await called(here, OPENED)
            found["urls"].append({"url": url, "said": said, "reached": kept, "opened": listener.taken()})
        listener.mute = True
        for kind in BROKERS:
            for host in [*hosts, f"rebind-{kind}.test"]:
                said, kept = await sent(kind, host, listener.port, CLOSED), listener.taken()
                found["brokers"].append({"kind": kind, "host": host, "said": said, "reached": kept})
    return found


if __name__ == "__main__":
    settle()
    with tempfile.TemporaryDirectory() as made:
        resolve_here(Path(made))
        asked = json.load(sys.stdin)
        print(json.dumps(asyncio.run(tried(asked["urls"], asked["hosts"]))))
