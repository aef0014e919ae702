"""A request of a client, as the parts that answer it read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from app.rocketmq.buffers import BufferedBytes
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.remoting.codes import RemotingRefused, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.remoting_clients import ClientConnection, RemotingClient


class IdentifiedConnection(ClientConnection, Protocol):
    """A connection, and the client that its heartbeat named. `heartbeat_refused`: why its last one was refused."""

    client: RemotingClient | None
    heartbeat_refused: str | None


@dataclass(frozen=True, slots=True)
class RemotingCall:
    """A request, who sent it, with which rights, and what it and its answer hold of the gateway's memory."""

    frame: RemotingFrame
    connection: IdentifiedConnection
    keys: ApiKeys
    buffered: BufferedBytes

    def text(self, name: str) -> str:
        """Return a field that must be there. Raises RemotingRefused."""
        value = self.frame.fields.get(name, "")
        if not value:
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, f"The request has no field `{name}`.")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number. Raises RemotingRefused."""
        value = self.frame.fields.get(name, "")
        if not value and default is not None:
            return default
        try:
            return int(value)
        except ValueError:
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, f"The field `{name}` is no number.") from None

    def body(self) -> Mapping[str, Any]:
        """Return the body, an object in JSON. Raises RemotingRefused."""
        try:
            read = msgspec.json.decode(self.frame.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, "The request's body is no object in JSON.")
        return read

    def client(self) -> RemotingClient:
        """Return the client, which its heartbeat has named. Raises RemotingRefused."""
        client = self.connection.client
        if client is None or client.keys != self.keys:
            text = "The gateway has no heartbeat of this client yet; the next one is enough."
            raise RemotingRefused(ResultCode.SUBSCRIPTION_NOT_EXIST, self.after_heartbeat(text))
        return client

    def after_heartbeat(self, text: str) -> str:
        """Return why something that heartbeats name is not known: because the last one was refused, else `text`."""
        refused = self.connection.heartbeat_refused
        return text if refused is None else f"The client's last heartbeat was refused: {refused}"
