"""Servers of asyncio at an address, of both kinds of addresses if it is `::`."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LIMIT_BYTES = 64 * 1024


async def start_server(connected: Connected, host: str, port: int, *, limit: int = LIMIT_BYTES) -> asyncio.Server:
    """Listen. `limit`: bytes that are buffered of a connection before they are read. Raises OSError."""
    if ":" not in host:
        return await asyncio.start_server(connected, host, port, limit=limit)
    # asyncio listens at `::` for IPv6 only. The gRPC port there is for IPv4 too, and a cluster of both kinds may probe
    # by IPv4.
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=both)
    try:
        return await asyncio.start_server(connected, sock=listener, limit=limit)
    except BaseException:
        listener.close()
        raise


def local_address(host: str) -> str:
    """Return the address of a connection's own end; one of IPv4 at a socket for both kinds as IPv4 writes it."""
    return host.removeprefix("::ffff:") if "." in host else host
