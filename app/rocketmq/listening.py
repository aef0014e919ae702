"""Servers of asyncio at an address, of both kinds of addresses if it is `::`."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LIMIT_BYTES = 64 * 1024


async def start_server(connected: Connected, host: str, port: int, *, limit: int = LIMIT_BYTES) -> asyncio.Server:
    """Listen. `limit`: bytes that are buffered of a connection before they are read. Raises OSError.

    A connection whose task is canceled ends.
    """
    serve = partial(_until_canceled, connected)
    if ":" not in host:
        return await asyncio.start_server(serve, host, port, limit=limit)
    # asyncio listens at `::` for IPv6 only. The gRPC port there is for IPv4 too, and a cluster of both kinds may probe
    # by IPv4.
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=both)
    try:
        return await asyncio.start_server(serve, sock=listener, limit=limit)
    except BaseException:
        listener.close()
        raise


async def _until_canceled(connected: Connected, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await connected(reader, writer)
    except asyncio.CancelledError:
        # Only a server that stops cancels it. Python 3.11 would log a traceback, and leave the connection open.
        writer.transport.abort()


def local_address(host: str) -> str:
    """Return the address of a connection's own end; one of IPv4 at a socket for both kinds as IPv4 writes it."""
    return host.removeprefix("::ffff:") if "." in host else host
