"""Has the kernels end a TCP connection whose other machine is gone.

A machine that loses its power sends no last packet. A connection on which only an answer is awaited has nothing to send
again, so without probes it waits for ever. The server's side of a connection holds the locks of its database
transaction meanwhile.
"""

import socket

# A connection is lost when the server's kernel has not answered for so long.
SILENT_S = 30
# The first probe, and the seconds between it and the next ones.
IDLE_S, PROBE_EVERY_S = 10, 5
PROBES = (SILENT_S - IDLE_S) // PROBE_EVERY_S

# By name: platforms differ in what they have. macOS calls the first one TCP_KEEPALIVE.
_OPTIONS = {
    "TCP_KEEPIDLE": IDLE_S,
    "TCP_KEEPALIVE": IDLE_S,
    "TCP_KEEPINTVL": PROBE_EVERY_S,
    "TCP_KEEPCNT": PROBES,
    # Milliseconds, also for what was sent and is not acknowledged: by default that is sent again for 15 minutes.
    "TCP_USER_TIMEOUT": SILENT_S * 1000,
}

# The same on the server's side: a kernel that lacks one, and a Unix socket, ignore it. Behind a pooler they are of its
# connection to the server.
ON_THE_SERVER = {
    "tcp_keepalives_idle": IDLE_S,
    "tcp_keepalives_interval": PROBE_EVERY_S,
    "tcp_keepalives_count": PROBES,
    "tcp_user_timeout": SILENT_S * 1000,
}


def keep_alive(connection_socket: socket.socket | None) -> None:
    """Set the options on a TCP connection's socket. A Unix socket ends with its server and needs none."""
    if connection_socket is None or connection_socket.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        option: int | None = getattr(socket, name, None)
        if option is not None:
            connection_socket.setsockopt(socket.IPPROTO_TCP, option, value)
