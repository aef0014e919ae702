"""What every call of a client brings: who calls, and how long the caller waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused


class CallContext(Protocol):
    """The part of gRPC's context that is used."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers."""

    def peer(self) -> str:
        """Return the address of the client, which is another for each connection."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline; None: no deadline."""


@dataclass(frozen=True, slots=True)
class ClientCall:
    """Who calls, with which rights, for how many seconds the caller waits (None: without end), and its language.

    `peer`: the client's end of the connection.
    """

    client_id: str
    keys: ApiKeys
    left_s: float | None
    language: str = ""
    peer: str = ""


def client_call(context: CallContext, credentials: Credentials) -> ClientCall:
    """Return who calls. Raises CallRefused."""
    metadata = {name.lower(): value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
    keys = credentials.keys_of(metadata)
    client_id = metadata.get("x-mq-client-id", "").strip()
    if not client_id:
        raise CallRefused(Code.CLIENT_ID_REQUIRED, "The header x-mq-client-id is missing.")
    language = metadata.get("x-mq-language", "").upper()
    return ClientCall(client_id, keys, context.time_remaining(), language, context.peer())
