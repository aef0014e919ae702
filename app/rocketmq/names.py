"""Names of RocketMQ's resources, checked as RocketMQ's proxy checks them, and their names in Halfnote."""

from app.field_rules import NAME_MAX, is_subscription_name
from app.rocketmq.protocol.definition_pb2 import Code, Resource
from app.rocketmq.refusals import CallRefused
from app.topic_patterns import is_reserved

# RocketMQ's own limits. A dot is added: Halfnote's topics often have one, and a namespace ends with one.
TOPIC_MAX = 127
GROUP_MAX = 120
# The beginning of RocketMQ's own topics, in any case.
_SYSTEM = "rmq_sys_"
_ALLOWED = frozenset("%|_-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def topic_of(resource: Resource) -> str:
    """Return the topic's name in Halfnote: `namespace.name`, or the name. Raises CallRefused."""
    name = _joined(resource)
    fault = _fault(resource.name, TOPIC_MAX) or _fault(name, NAME_MAX)
    if fault:
        raise CallRefused(Code.ILLEGAL_TOPIC, f"The topic {fault}.")
    if resource.name.lower().startswith(_SYSTEM):
        raise CallRefused(Code.ILLEGAL_TOPIC, f"The topic `{name}` is RocketMQ's own.")
    if is_reserved(name):
        raise CallRefused(Code.ILLEGAL_TOPIC, f"The topic `{name}` is Halfnote's own.")
    return name


def subscription_of(group: Resource, topic: str) -> str:
    """Return the subscription of a consumer group and a topic: `group@topic`. Raises CallRefused."""
    fault = _fault(group.name, GROUP_MAX)
    if fault:
        raise CallRefused(Code.ILLEGAL_CONSUMER_GROUP, f"The consumer group {fault}.")
    name = f"{_joined(group)}@{topic}"
    if not is_subscription_name(name):
        raise CallRefused(
            Code.ILLEGAL_CONSUMER_GROUP,
            f"`{name}` is no name of a subscription: `%` and `|` are not allowed, and it has at most {NAME_MAX} "
            "characters.",
        )
    return name


def producer_group_of(resource: Resource) -> str:
    """Return the name in Halfnote of a producer group, which only the remoting protocol has. Raises CallRefused."""
    fault = _fault(resource.name, NAME_MAX)
    if fault:
        raise CallRefused(Code.BAD_REQUEST, f"The producer group {fault}.")
    return _joined(resource)


def _joined(resource: Resource) -> str:
    return f"{resource.resource_namespace}.{resource.name}" if resource.resource_namespace else resource.name


def _fault(name: str, most: int) -> str | None:
    if not name.strip(" ."):
        return "is blank"
    if len(name) > most:
        return f"has more than {most} characters"
    if not _ALLOWED.issuperset(name):
        return f"`{name}` has other characters than letters, digits, `%`, `|`, `_`, `-` and `.`"
    return None
