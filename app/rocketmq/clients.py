"""The clients that are connected to this process, by the streams that they hold open."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

from app.rocketmq.calls import ClientCall
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.protocol.definition_pb2 import ClientType, Resource, Settings
from app.rocketmq.protocol.service_pb2 import RecoverOrphanedTransactionCommand, TelemetryCommand
from app.rocketmq.receiving import ClaimedOrphan, orphaned
from app.rocketmq.renewals import ConnectionTimes

# Commands that wait for a client which does not read. More are not sent to it.
WAITING_MAX = 200
# Push consumers of which is kept that they call their handler without order; then the oldest is forgotten.
UNORDERED_MAX = 10_000


class ConnectedClient:
    """A client with an open stream. `topics`: what it publishes to, by name in Halfnote.

    `connection`: the times of the stream's connection.
    """

    def __init__(self, client_id: str, keys: ApiKeys, connection: ConnectionTimes | None = None) -> None:
        self.client_id, self.keys = client_id, keys
        self.settings = Settings()
        self.topics: dict[str, Resource] = {}
        # The filter expression that this client last gave, by subscription.
        self.expressions: dict[str, str] = {}
        self.connection = connection or ConnectionTimes()
        self.sends_transactions = False
        # Whether the client calls its handler in order; None: it has no settings yet.
        self.fifo: bool | None = None
        self._commands: asyncio.Queue[TelemetryCommand | None] = asyncio.Queue(WAITING_MAX)

    @property
    def pushes(self) -> bool:
        """Whether it is a push consumer: one whose handler is called for each message."""
        return self.settings.client_type == ClientType.PUSH_CONSUMER

    def send(self, command: TelemetryCommand) -> bool:
        """Send a command; return False if the client does not read."""
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            return False
        return True

    async def next_command(self) -> TelemetryCommand | None:
        """Return the next command for the client; None: the stream is to end."""
        return await self._commands.get()

    def taken(self) -> None:
        """Note that the client has taken a command."""
        self._commands.task_done()

    async def all_taken(self) -> None:
        """Wait until the client has taken every command, or has left."""
        await self._commands.join()

    def left(self, *, broke: bool) -> None:
        """Note that the stream has ended, in order or because it broke: what waits is not taken any more."""
        self.connection.streams -= 1
        # A client may cancel a stream when it has another one. If the connection broke, all of them end.
        if broke and self.connection.streams <= 0:
            self.connection.broke_at = time.monotonic()
        # It is raised when nothing is left to take.
        with contextlib.suppress(ValueError):
            while True:
                self._commands.task_done()

    def end(self) -> None:
        """End the stream after what waits."""
        if self._commands.full():
            self._commands.get_nowait()
        self._commands.put_nowait(None)


class ConnectedClients:
    """All of this process. `on_change` is called when a topic gets its first producer or loses its last."""

    def __init__(self) -> None:
        # By keys as well: a client cannot take the place of one that has other rights. All streams of each, that with
        # the newest settings last: a client has one for each address, and two of them may lead to this process.
        self._by_id: dict[tuple[str, ApiKeys], dict[ConnectedClient, None]] = {}
        # By the client's end of the connection. Kept by the streams there, and by the answers that it brought: one that
        # ended in order leaves it to the next stream to note that the connection broke.
        self._connections: WeakValueDictionary[tuple[str, ApiKeys, str], ConnectionTimes] = WeakValueDictionary()
        # All with an open stream, also those without settings yet.
        self._open: set[ConnectedClient] = set()
        self._is_closed = False
        self._turn: dict[str, int] = {}
        # By hash: a client chooses the length of its id, and two of one hash only get fewer messages at a time.
        self._unordered: dict[int, None] = {}
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, client_id: str, keys: ApiKeys) -> ConnectedClient | None:
        """Return the client with this id and these rights, by the stream of its newest settings."""
        streams = self._by_id.get((client_id, keys))
        return None if streams is None else next(reversed(streams))

    def connection_of(self, call: ClientCall) -> ConnectionTimes | None:
        """Return the times of a call's connection, by a stream there; else of that of the client's newest settings.

        None: the client is not connected.
        """
        client = self.get(call.client_id, call.keys)
        known = self._known_connection(call)
        return known if known is not None or client is None else client.connection

    def opened(self, call: ClientCall) -> ConnectedClient:
        """Return a client's new stream. After `close` it ends at once."""
        connection = self._known_connection(call)
        if connection is None:
            connection = self._connections[call.client_id, call.keys, call.peer] = ConnectionTimes()
        connection.streams += 1
        client = ConnectedClient(call.client_id, call.keys, connection)
        self._open.add(client)
        if self._is_closed:
            client.end()
        return client

    def add(self, client: ConnectedClient) -> None:
        """Add a client, or another stream of it, or note that its settings are the newest."""
        streams = self._by_id.setdefault((client.client_id, client.keys), {})
        streams.pop(client, None)
        streams[client] = None
        self.on_change()

    def remove(self, client: ConnectedClient) -> None:
        """Remove a stream that ended, and its client if it was the last one."""
        self._open.discard(client)
        known_as = client.client_id, client.keys
        streams = self._by_id.get(known_as, {})
        if client in streams:
            del streams[client]
            if not streams:
                del self._by_id[known_as]
            self.on_change()

    def leave(self, client: ConnectedClient) -> None:
        """Remove a client that says that it ends, and end all its streams."""
        for one in self._by_id.pop((client.client_id, client.keys), {}):
            one.end()
        self._forget_order(client)
        self.on_change()

    def calls_in_order(self, client: ConnectedClient, *, told: bool) -> bool:
        """Note what a stream's first settings said of the order; return whether the client calls its handler in order.

        Apache's client for Java decides that for its whole life by the first settings that it gets. It opens another
        stream when one breaks, and one for each address, and does not say what it has decided.
        """
        known_as = hash((client.client_id, client.keys))
        if told:
            return known_as not in self._unordered
        self._unordered[known_as] = None
        if len(self._unordered) > UNORDERED_MAX:
            del self._unordered[next(iter(self._unordered))]
        return False

    def close(self) -> None:
        """End all streams, so that the clients connect elsewhere."""
        self._is_closed = True
        for client in self._open:
            client.end()

    def producers_of(self, topic: str, keys: ApiKeys) -> list[ConnectedClient]:
        """Return whom to ask about a transaction, the next in turn first.

        Clients that sent a transaction come before those that never did, which may have no checker.
        """
        found = [one for one in self._connected() if topic in one.topics and one.keys == keys]
        if not found:
            return []
        turn = self._turn[topic] = self._turn.get(topic, -1) + 1
        ahead = turn % len(found)
        return sorted(found[ahead:] + found[:ahead], key=lambda one: not one.sends_transactions)

    def ask(self, topic: str, keys: ApiKeys, check: ClaimedOrphan) -> ConnectedClient | None:
        """Send a check to one of the topic's producers; return it, or None if none takes it."""
        for client in self.producers_of(topic, keys):
            command = RecoverOrphanedTransactionCommand(
                message=orphaned(check, client.topics[topic]), transaction_id=str(check.transaction_id)
            )
            if client.send(TelemetryCommand(recover_orphaned_transaction_command=command)):
                return client
        return None

    def published(self) -> set[tuple[str, ApiKeys]]:
        """Return the topics that have a producer here, with the keys under which their checks are claimed."""
        return {(topic, one.keys) for one in self._connected() for topic in one.topics}

    def _forget_order(self, client: ConnectedClient) -> None:
        """Forget what was noted of the order: the client has ended, and one with its id may start."""
        self._unordered.pop(hash((client.client_id, client.keys)), None)

    def _known_connection(self, call: ClientCall) -> ConnectionTimes | None:
        """Return the times of a call's connection. One that broke may have left its address to another."""
        found = self._connections.get((call.client_id, call.keys, call.peer))
        return found if found is not None and found.broke_at is None else None

    def _connected(self) -> Iterator[ConnectedClient]:
        return (next(reversed(streams)) for streams in self._by_id.values())
