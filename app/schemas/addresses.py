"""Formats of hosts, ports and URLs in requests: one pattern for the OpenAPI document and the check."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, WithJsonSchema

from app.egress.network_policy import OWN_PORTS, NetworkPolicy
from app.egress.urls import LONGEST_URL, literal_fault

HOST = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
PORT = r":([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
# A path of one segment, percent-encoded.
_SEGMENT = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*"


def _url(schemes: str, path: str, fault: str) -> AfterValidator:
    whole = re.compile(rf"{schemes}://{HOST}({PORT})?{path}").fullmatch

    def check(value: str) -> str:
        if len(value) > LONGEST_URL or not whole(value):
            raise ValueError(f"must be {fault}, without user, password or query")
        return value

    return AfterValidator(check)


def _schema(schemes: str, path: str) -> WithJsonSchema:
    pattern = rf"^{schemes}://{HOST}({PORT})?{path}$"
    return WithJsonSchema({"type": "string", "maxLength": LONGEST_URL, "pattern": pattern})


_AMQP = ("amqps?", f"(/{_SEGMENT})?")
_NATS = ("(nats|tls)", "")
_REDIS = ("rediss?", "(/[0-9]{0,4})?")
AmqpUrl = Annotated[
    str, _url(*_AMQP, "amqp:// or amqps://, a host, perhaps a port and `/vhost` (percent-encoded)"), _schema(*_AMQP)
]
NatsUrl = Annotated[str, _url(*_NATS, "nats:// or tls://, a host and perhaps a port"), _schema(*_NATS)]
RedisUrl = Annotated[
    str,
    _url(*_REDIS, "redis:// or rediss://, a host, perhaps a port and `/` with a database's number"),
    _schema(*_REDIS),
]

# A name of 253 characters and a port; an address is shorter.
HOST_PORT_MAX = 259
_HOST_PORT = f"{HOST}{PORT}"
_host_port = re.compile(_HOST_PORT).fullmatch


def _check_host_port(value: str) -> str:
    if len(value) > HOST_PORT_MAX or not _host_port(value):
        raise ValueError("must be `host:port`")
    return value


HostPort = Annotated[
    str,
    AfterValidator(_check_host_port),
    WithJsonSchema({"type": "string", "maxLength": HOST_PORT_MAX, "pattern": f"^{_HOST_PORT}$"}),
]


def host_fault(kind: str, address: str, network_policy: NetworkPolicy, *, encrypted: bool) -> str | None:
    """Say what is wrong with a broker's URL or `host:port`, or None. A name is judged when a connection is made."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "is not an address"
    fault = None if encrypted else network_policy.plain_fault()
    if fault is None and port is not None:
        fault = network_policy.port_fault(port, OWN_PORTS[kind])
    return fault or literal_fault(host, network_policy)
