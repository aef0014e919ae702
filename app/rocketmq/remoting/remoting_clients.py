"""The clients that are connected by remoting, known by their heartbeats."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from app.rocketmq.credentials import ApiKeys
from app.rocketmq.filters import Filters
from app.rocketmq.receiving import ClaimedOrphan
from app.rocketmq.remoting.claim_queues import ClaimQueue, HeldDelivery, QueueName
from app.rocketmq.remoting.codes import RequestCode
from app.rocketmq.remoting.frames import RemotingFrame, oneway
from app.rocketmq.remoting.names import INNER_PRODUCER, producer_group_of
from app.rocketmq.remoting.read_messages import message_id_of, orphaned_message
from app.rocketmq.remoting.store_format import Host, encode_message, message_id

# What a client held is remembered for so long after its connection ended. Its claims are over by then.
LINGER_S = 60.0
# As in RocketMQ. Orderly consumers lock their queues again every 20 s.
LOCK_S = 60.0
_numbers = count(1)


class ClientConnection(Protocol):
    """A connection to which frames can be sent."""

    @property
    def number(self) -> int:
        """The number of the connection, which no other one of this process has."""

    @property
    def host(self) -> Host:
        """The address of this server on the connection."""

    @property
    def takes_answers(self) -> bool:
        """Whether the client is there, and reads."""

    def send(self, frame: RemotingFrame) -> bool:
        """Send a frame; return False if the client is gone or does not read."""

    async def all_taken(self) -> None:
        """Wait until the client has taken nearly all that was sent, or is gone."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """What a client says of a consumer group: how it filters each topic, and from where a new group begins."""

    broadcasting: bool
    start: str
    filters: Mapping[str, Filters]


class RemotingClient:
    """A client. `producers` are its producer groups by name in Halfnote, with the names that the client uses.

    `name`: by which RemotingClients knows it.
    """

    def __init__(self, client_id: str, name: str, keys: ApiKeys) -> None:
        self.client_id, self.name, self.keys = client_id, name, keys
        self.connection: ClientConnection | None = None
        self.left_at = 0.0
        self.producers: dict[str, str] = {}
        self.consumers: dict[str, GroupMember] = {}
        self.sends_transactions: set[str] = set()
        # Consumer groups and topics whose subscriptions may not filter yet as this client says. Each heartbeat and each
        # pull tries again.
        self.unready: set[tuple[str, str]] = set()
        self._queues: dict[QueueName, ClaimQueue] = {}
        self._locked: dict[str, float] = {}

    def lock(self, group: str) -> None:
        """Note that this client has locked queues of a consumer group now."""
        now = time.monotonic()
        self._locked = {one: until for one, until in self._locked.items() if until > now}
        self._locked[group] = now + LOCK_S

    def has_locked(self, group: str) -> bool:
        """Return whether a lock of this client on queues of a consumer group is not over."""
        return self._locked.get(group, 0.0) > time.monotonic()

    def has_producers(self, producers: dict[str, str]) -> None:
        """Note the producer groups that this client has now, and forget what it sent by others."""
        self.producers = producers
        self.sends_transactions &= producers.keys()

    async def all_taken(self) -> None:
        """Wait until this client has taken nearly all that was sent to it, or is gone."""
        if self.connection is not None:
            await self.connection.all_taken()

    def queue(self, group: str, topic: str, queue_id: int) -> ClaimQueue | None:
        """Return a queue that this client began; None: it began none here."""
        return self._queues.get(QueueName(group, topic, queue_id))

    def begin(self, group: str, topic: str, queue_id: int, subscription: str, after: int | None = None) -> ClaimQueue:
        """Return a queue, begun if this client began none. `after`: an offset that this process did not give."""
        name = QueueName(group, topic, queue_id)
        return self._queues.setdefault(name, ClaimQueue(name, subscription, after))

    def still_has(self, queue: ClaimQueue) -> bool:
        """Return whether this client still names the group and topic of a queue, and did not begin another one."""
        return self._knows(queue) and self.names(queue.name.group, queue.name.topic)

    def hold_again(self, queue: ClaimQueue, deliveries: Iterable[HeldDelivery]) -> bool:
        """Note that this client holds messages whose settlement failed. Return False if their queue is forgotten."""
        if not self._knows(queue):
            return False
        queue.hold(deliveries)
        return True

    def queues_of(self, group: str) -> list[ClaimQueue]:
        """Return the queues of a consumer group."""
        return [queue for queue in self._queues.values() if queue.name.group == group]

    def former_queues(self) -> list[ClaimQueue]:
        """Return the queues of groups and topics that this client does not name any more."""
        return [queue for queue in self._queues.values() if not self.names(queue.name.group, queue.name.topic)]

    def names(self, group: str, topic: str) -> bool:
        """Return whether this client has a consumer of a group and a topic."""
        return group in self.consumers and topic in self.consumers[group].filters

    def forget(self, queues: Iterable[ClaimQueue]) -> None:
        """Forget queues."""
        for queue in queues:
            del self._queues[queue.name]

    def _knows(self, queue: ClaimQueue) -> bool:
        return self._queues.get(queue.name) is queue


class RemotingClients:
    """All of this process. `on_change` is called when a producer group may have got or lost a producer.

    `several_brokers`: whether clients know several addresses. Two of them may lead to this process, and a request does
    not say which of them its client took. The client has a queue 0 of each, with offsets of its own. So each connection
    is then a client of its own, also after a reconnect: what was held by the former one comes again.
    """

    def __init__(self, *, several_brokers: bool = False) -> None:
        self._several_brokers = several_brokers
        # By keys as well: a client cannot take the place of one that has other rights.
        self._by_name: dict[tuple[str, ApiKeys], RemotingClient] = {}
        self._turn: dict[str, int] = {}
        self.on_change: Callable[[], None] = lambda: None

    def get(self, client_id: str, keys: ApiKeys) -> RemotingClient | None:
        """Return the connected client with this name and these rights."""
        found = self._by_name.get((client_id, keys))
        return found if found is not None and found.connection is not None else None

    def consumers_of(self, client_id: str, keys: ApiKeys, connection: ClientConnection) -> Mapping[str, GroupMember]:
        """Return the consumer groups of a client that connects. It may have had another connection."""
        found = self._by_name.get((self._name(client_id, connection), keys))
        return {} if found is None else found.consumers

    def consumers_beside(
        self, client_id: str, keys: ApiKeys, connection: ClientConnection
    ) -> Mapping[str, GroupMember]:
        """Return the consumer groups of a client that the heartbeat of a connection does not have to name.

        A heartbeat names all groups of its client. But two programs may have one client id, as those in containers
        whose process ids are the same: then the last heartbeat came by another connection that is still open.
        """
        found = self._by_name.get((self._name(client_id, connection), keys))
        return {} if found is None or found.connection in (None, connection) else found.consumers

    def connect(self, client_id: str, keys: ApiKeys, connection: ClientConnection) -> RemotingClient:
        """Return the client of a connection; one that comes back has the queues that it had."""
        name = self._name(client_id, connection)
        client = self._by_name.setdefault((name, keys), RemotingClient(client_id, name, keys))
        client.connection = connection
        return client

    def disconnect(self, connection: ClientConnection) -> None:
        """Note that a connection has ended, and forget clients that ended theirs long ago."""
        now = time.monotonic()
        for client in self._by_name.values():
            if client.connection is connection:
                client.connection, client.left_at = None, now
        self._by_name = {
            key: client
            for key, client in self._by_name.items()
            if client.connection is not None or now - client.left_at < LINGER_S
        }
        self.on_change()

    def published(self) -> set[tuple[str, ApiKeys]]:
        """Return the producer groups that have a producer here, with the keys under which their checks are claimed."""
        return {(group, client.keys) for client in self._connected() for group in client.producers}

    def ask(self, group: str, keys: ApiKeys, check: ClaimedOrphan) -> RemotingClient | None:
        """Send a check to one of the group's producers; return it, or None if none takes it."""
        found = [one for one in self._connected() if group in one.producers and one.keys == keys]
        turn = self._turn[group] = self._turn.get(group, -1) + 1
        ahead = turn % max(1, len(found))
        # Clients that sent a transaction come before those that never did, which may have no listener.
        for client in sorted(found[ahead:] + found[:ahead], key=lambda one: group not in one.sends_transactions):
            connection = client.connection
            if connection is not None and connection.send(
                _check_frame(check, client.producers[group], connection.host)
            ):
                return client
        return None

    def is_locked(self, group: str, keys: ApiKeys) -> bool:
        """Return whether a client with these rights works on a consumer group in order."""
        return any(one.keys == keys and one.has_locked(group) for one in self._by_name.values())

    def _name(self, client_id: str, connection: ClientConnection) -> str:
        return f"{client_id} {connection.number}" if self._several_brokers else client_id

    def _connected(self) -> Iterator[RemotingClient]:
        return (client for client in self._by_name.values() if client.connection is not None)


def named_producers(groups: list[str]) -> dict[str, str]:
    """Return producer groups by their names in Halfnote. Raises CallRefused."""
    return {producer_group_of(group): group for group in groups if group != INNER_PRODUCER}


def _check_frame(check: ClaimedOrphan, group: str, host: Host) -> RemotingFrame:
    message = orphaned_message(check, group)
    unique_key = message_id_of(check.messages[0])
    fields = {
        "topic": message.topic,
        "tranStateTableOffset": message.queue_offset,
        "commitLogOffset": message.position,
        "msgId": unique_key,
        "transactionId": unique_key,
        "offsetMsgId": message_id(host, message.position),
    }
    return oneway(RequestCode.CHECK_TRANSACTION_STATE, next(_numbers), fields, encode_message(message, host))
