"""`halfnote rocketmq`: the gateway for RocketMQ's clients."""

import asyncio
import os
import re
import ssl
from pathlib import Path
from typing import Annotated

import typer

from app.cli.api_client import DEFAULT_URL, Url, own_key, trusted
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.finite import finite
from app.lifecycle.signals import hangup_as_sigterm
from app.observability.logs import set_up_logs

PORT = 8081
# In base64 it fits into HALFNOTE_BODY_LIMIT_BYTES (4 MiB), with room for its headers.
BODY_BYTES = 3_000_000
REQUEST_S = 20.0
CONNECTIONS = 4096
TOPICS = 1000
SETTINGS_BYTES = 1024 * 1024
SETTINGS_PER_MINUTE = 60
# gRPC has numbers of 32 bits.
LARGEST_BYTES, LARGEST_MEMORY, MOST = 256 * 1024 * 1024, 2**40, 1_000_000
# With the program itself, about four times as much is below 512 MiB.
BUFFERED_BYTES = 64 * 1024 * 1024
# Those of the service's HALFNOTE_DRAIN_S.
DRAIN_S, LONGEST_DRAIN_S = 8.0, 86_400

Host = Annotated[str, typer.Option(help="the address to listen on")]
Port = Annotated[int, typer.Option(help="the port to listen on", min=0, max=65_535)]
CredentialsFile = Annotated[
    Path | None,
    typer.Option(help="YAML with access keys, their secrets and their API keys; without it every client may call"),
]
Certificate = Annotated[Path | None, typer.Option(help="PEM file of a certificate chain; without it there is no TLS")]
CertificateKey = Annotated[Path | None, typer.Option(help="PEM file of the certificate's key")]
RemotingPort = Annotated[
    int | None,
    typer.Option(
        help="the port for RocketMQ 4 clients, usually 9876; without it they are not served", min=0, max=65_535
    ),
]
RemotingAddress = Annotated[
    list[str] | None,
    typer.Option(
        help="host:port by which RocketMQ 4 clients reach this gateway, once for each gateway; without it the address "
        "to which they connect"
    ),
]
OperationsPort = Annotated[
    int | None,
    typer.Option(help="the port for probes and metrics over HTTP; without it there are none", min=0, max=65_535),
]
BodyBytes = Annotated[
    int,
    typer.Option(
        help="the largest body of a message; about 0.7 of the service's HALFNOTE_BODY_LIMIT_BYTES",
        min=1,
        max=LARGEST_BYTES,
    ),
]
RequestTime = Annotated[
    float,
    typer.Option(
        help="seconds in which a request must arrive; a slower one ends, so that it holds no memory",
        min=0.1,
        max=86_400,
        callback=finite,
    ),
]
Connections = Annotated[
    int,
    typer.Option(help="the most connections of each port; clients of further ones are refused", min=1, max=MOST),
]
Topics = Annotated[
    int,
    typer.Option(
        help="the most topics and producer groups that one client may name; the gateway works for each of them",
        min=1,
        max=MOST,
    ),
]
SettingsBytes = Annotated[
    int, typer.Option(help="the largest settings that a RocketMQ 5 client may send of itself", min=1, max=LARGEST_BYTES)
]
SettingsPerMinute = Annotated[
    int, typer.Option(help="how often in a minute a RocketMQ 5 client may send its settings", min=1, max=MOST)
]
BufferedBytes = Annotated[
    int,
    typer.Option(
        help="bytes of requests and claimed messages that the gateway holds at once; its memory is about four times as "
        "much, and more of them wait",
        min=1024 * 1024,
        max=LARGEST_MEMORY,
    ),
]


def _positive(value: float) -> float:
    if not 0 < value <= LONGEST_DRAIN_S:
        raise typer.BadParameter(f"{value} is not more than 0 and at most {LONGEST_DRAIN_S}.")
    return value


DrainTime = Annotated[
    float,
    typer.Option(
        "--drain-s",
        envvar="HALFNOTE_DRAIN_S",
        help="seconds in which calls may end after SIGTERM; more than 0, at most 86,400",
        callback=_positive,
    ),
]


def rocketmq(
    url: Url = DEFAULT_URL,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    credentials: CredentialsFile = None,
    tls_cert: Certificate = None,
    tls_key: CertificateKey = None,
    max_body_bytes: BodyBytes = BODY_BYTES,
    request_timeout_s: RequestTime = REQUEST_S,
    max_connections: Connections = CONNECTIONS,
    max_topics: Topics = TOPICS,
    max_settings_bytes: SettingsBytes = SETTINGS_BYTES,
    max_settings_per_minute: SettingsPerMinute = SETTINGS_PER_MINUTE,
    max_buffered_bytes: BufferedBytes = BUFFERED_BYTES,
    drain_s: DrainTime = DRAIN_S,
    remoting_port: RemotingPort = None,
    remoting_address: RemotingAddress = None,
    operations_port: OperationsPort = None,
) -> None:
    """Serve RocketMQ clients, on the HTTP API of a running Halfnote. Ends at SIGTERM, or when its terminal is closed.

    RocketMQ 5 clients use gRPC, RocketMQ 4 clients and those of 5 for remoting use --remoting-port.
    """
    if (tls_cert is None) != (tls_key is None):
        raise Refusal("--tls-cert and --tls-key go together.", code=WRONG_USAGE)
    try:
        from app.rocketmq.credentials import ApiKeys, Credentials, CredentialsFault, read_credentials
        from app.rocketmq.request_limits import RequestLimits
        from app.rocketmq.server import CannotListen, GatewayOptions, serve_gateway
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("grpc", "google"):
            raise
        raise Refusal("RocketMQ clients need gRPC: pip install 'halfnote-server[rocketmq]'", code=WRONG_USAGE) from None
    key = own_key()
    if credentials is None and key is None and "HALFNOTE_API_KEY" in os.environ:
        raise Refusal(
            "HALFNOTE_API_KEY is empty. Set the API key of RocketMQ clients (ROCKETMQ_KEY in the .env of the compose "
            "file), or give --credentials.",
            code=WRONG_USAGE,
        )
    try:
        known = None if credentials is None else read_credentials(credentials)
    except CredentialsFault as fault:
        raise Refusal(str(fault), code=WRONG_USAGE) from None
    if any(not re.fullmatch(r"[^\s:;]+:\d{1,5}", address) for address in remoting_address or ()):
        raise Refusal("--remoting-address is host:port, with a name or an IPv4 address.", code=WRONG_USAGE)
    if any(address.startswith("0.0.0.0:") for address in remoting_address or ()):
        raise Refusal(
            "--remoting-address is where clients connect, not 0.0.0.0: give a name or an address of this machine.",
            code=WRONG_USAGE,
        )
    certificate = None if tls_cert is None or tls_key is None else (_usable(tls_cert, tls_key))
    set_up_logs()
    options = GatewayOptions(
        url=url,
        verify=trusted(url),
        host=host,
        port=port,
        credentials=Credentials(known, ApiKeys(key, key)),
        limits=RequestLimits(
            max_body_bytes,
            request_timeout_s,
            max_connections,
            max_topics,
            max_settings_bytes,
            max_settings_per_minute,
            max_buffered_bytes,
            drain_s,
        ),
        certificate=certificate,
        remoting_port=remoting_port,
        remoting_addresses=tuple(remoting_address or ()),
        operations_port=operations_port,
    )
    try:
        with hangup_as_sigterm():
            asyncio.run(serve_gateway(options))
    except CannotListen as error:
        raise Refusal(str(error)) from None


def _usable(certificate: Path, key: Path) -> tuple[Path, Path]:
    # gRPC says of an unusable certificate only that it cannot listen.
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise Refusal(f"{certificate} and {key} cannot be used for TLS: {error}", code=WRONG_USAGE) from None
    return certificate, key
