"""Names of the remoting protocol. `namespace%name` has a namespace, and some prefixes have a meaning."""

from app.rocketmq import names
from app.rocketmq.protocol.definition_pb2 import Resource

RETRY, DEAD_LETTERS = "%RETRY%", "%DLQ%"
# Each client has a producer of this group of its own, for messages that its consumers give back.
INNER_PRODUCER = "CLIENT_INNER_PRODUCER"
_SYSTEM = "RMQ_SYS_"


def topic_of(name: str) -> str:
    """Return the topic's name in Halfnote. Raises CallRefused."""
    return names.topic_of(_resource(name))


def subscription_of(group: str, topic: str) -> str:
    """Return the subscription of a consumer group and a topic in Halfnote. Raises CallRefused."""
    return names.subscription_of(_resource(group), topic)


def producer_group_of(name: str) -> str:
    """Return the producer group's name in Halfnote. Raises CallRefused."""
    return names.producer_group_of(_resource(name))


def namespaced(topic: str, group: str) -> str:
    """Return a topic of Halfnote as a client names it whose group's name has the same namespace."""
    namespace, found, _ = group.partition("%")
    if found and namespace and topic.startswith(f"{namespace}."):
        return f"{namespace}%{topic[len(namespace) + 1 :]}"
    return topic


def with_namespace(topic: str, group: str) -> str:
    """Return a topic with the namespace of a group. Clients leave it out of the topics of messages that they got."""
    namespace, found, _ = group.partition("%")
    return f"{namespace}%{topic}" if found and namespace and "%" not in topic else topic


def is_system(name: str) -> bool:
    """Return whether a topic is of RocketMQ itself, such as that of traces."""
    return name.startswith((_SYSTEM, DEAD_LETTERS))


def _resource(name: str) -> Resource:
    namespace, found, rest = name.partition("%")
    if not found or not namespace:
        return Resource(name=name)
    return Resource(resource_namespace=namespace, name=rest)
