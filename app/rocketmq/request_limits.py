"""What a request may take of the gateway: bytes, and time until it has arrived. The same for both protocols."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`body_bytes`: of one message. `arrives_s`: seconds from the beginning of a request to its last byte."""

    body_bytes: int
    arrives_s: float
