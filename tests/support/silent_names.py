"""Call receivers while name servers do not answer, in a network namespace with a real DNS server.

Run `python -m tests.support.silent_names LOOP` by `unshare -Urnm`, with `uvloop` or `asyncio`. It runs itself once more
as a client, and writes as JSON what that client got and what the DNS server was asked.
"""

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from app.egress.http_client import callback_client
from app.egress.network_policy import NetworkPolicy
from tests.support.dns_server import SILENT, A, NameServer
from tests.support.network_namespace import PUBLIC, listening, make_every_address_local, resolve_here
from tests.support.webhooks import networks_of

MODULE = "tests.support.silent_names"
# The C library waits this long for an answer: longer than anything here lasts.
PATIENCE = "timeout:30 attempts:5"
ANSWERED = {name: [[PUBLIC]] for name in ("known.test", "new.test")}
# Silent receivers that are called before a new name, and silent brokers before a known name.
FEW, MANY = 8, 100
TIMEOUT_S = 30.0
ENDS_WITHIN_S = 60.0


@dataclass(frozen=True)
class Seen:
    """`new` and `known`: what the calls to names that answer got; `ended`: calls to silent names that were over."""

    new: int | str
    known: list[str]
    ended: int


async def call_all(port: int) -> Seen:
    """Call and resolve silent names, and meanwhile names that answer."""
    policy = NetworkPolicy(opened=networks_of("0.0.0.0/0", "::/0"))
    await policy.resolved("known.test", port, encrypted=False)
    async with callback_client(policy) as client:
        receivers = [f"http://receiver-{number}{SILENT}:{port}/" for number in range(FEW)]
        silent: list[asyncio.Task[object]] = [
            asyncio.create_task(client.call(url, b"{}", {}, timeout_s=TIMEOUT_S)) for url in receivers
        ]
        new = await client.call(f"http://new.test:{port}/", b"{}", {}, timeout_s=TIMEOUT_S)
        silent += [
            asyncio.create_task(policy.resolved(f"broker-{number}{SILENT}", port, encrypted=False))
            for number in range(MANY)
        ]
        try:
            known = await asyncio.wait_for(policy.resolved("known.test", port, encrypted=False), TIMEOUT_S)
        except TimeoutError:
            known = []
        ended = sum(task.done() for task in silent)
        # The last calls share the lookups that the first ones began.
        silent += [asyncio.create_task(client.call(url, b"{}", {}, timeout_s=TIMEOUT_S)) for url in receivers]
        await asyncio.sleep(0)
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        return Seen(new.status or new.error or "", known, ended)


async def serve_names(loop: str) -> dict[str, object]:
    """Run the client; return what it got, the most questions for one silent name, and whether the client ended."""
    async with NameServer(ANSWERED, port=53) as server, listening() as listener:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, loop, str(listener.port)), stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        try:
            seen = json.loads(await client.stdout.readline())
            await asyncio.wait_for(client.wait(), ENDS_WITHIN_S)
        except TimeoutError:
            client.kill()
        status = await client.wait()
        silent = [count for (name, kind), count in server.asked.items() if name.endswith(SILENT) and kind == A]
        return {**seen, "status": status, "silent": len(silent), "most": max(silent)}


def main(loop: str, *port: str) -> None:
    """Be the client if there is a port, else serve names."""
    if port:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
            seen = runner.run(call_all(int(port[0])))
            print(json.dumps(asdict(seen)), flush=True)
        return
    make_every_address_local()
    with tempfile.TemporaryDirectory() as directory:
        resolve_here(Path(directory), PATIENCE)
        print(json.dumps(asyncio.run(serve_names(loop))))


if __name__ == "__main__":
    main(*sys.argv[1:])
