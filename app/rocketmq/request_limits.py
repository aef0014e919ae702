"""What a client may take of a gateway: bytes, time, connections, and work for what it says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of both protocols, but for settings, which only RocketMQ 5 clients send.

    `body_bytes`: of one message. `arrives_s`: seconds from the beginning of a request to its last byte. `connections`:
    of each port. `topics`: that a client may name as producer and consumer. `settings_bytes`: of one message of a
    stream of settings. `settings_per_minute`: messages of one such stream. `buffered_bytes`: of requests and claimed
    messages of all clients together. `drain_s`: seconds in which calls may end when the gateway stops.
    """

    body_bytes: int
    arrives_s: float
    connections: int
    topics: int
    settings_bytes: int
    settings_per_minute: int
    buffered_bytes: int
    drain_s: float = 8.0
