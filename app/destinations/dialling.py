"""To which addresses brokers may be dialled: those of their host that HALFNOTE_ALLOW_NETWORKS allows.

The client is then given an address, not the name, so that what was judged is what is connected to.
"""

import asyncio
import socket

from app.callbacks import AddressRefused, Network, allowed


async def resolved(host: str, port: int, networks: tuple[Network, ...]) -> list[str]:
    """Return the addresses of a host that are allowed, in the resolver's order; at least one.

    Raises AddressRefused if it has others only, OSError if it has none.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as fault:
        raise OSError(f"{host!r} is not a host name") from fault
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    good = [address for address in addresses if allowed(address, networks)]
    if not good:
        outside = ", ".join(addresses)
        named = host if outside == host else f"{host} ({outside})"
        raise AddressRefused(f"{named} is outside HALFNOTE_ALLOW_NETWORKS")
    return good
