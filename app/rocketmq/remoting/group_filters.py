"""How consumer groups filter: a group is ready when its subscriptions filter as its client last said."""

from collections.abc import Mapping

from app.rocketmq.remoting.names import RETRY, subscription_of, topic_of
from app.rocketmq.remoting.remoting_clients import GroupMember, RemotingClient
from app.rocketmq.subscriptions import Subscriptions


def changed_filters(former: Mapping[str, GroupMember], now: Mapping[str, GroupMember]) -> set[tuple[str, str]]:
    """Return the groups and topics of which a heartbeat says something new."""
    return {
        (group, topic)
        for group, member in now.items()
        if not member.broadcasting and former.get(group) != member
        for topic in member.filters
        if not topic.startswith(RETRY)
    }


async def filter_as_said(subscriptions: Subscriptions, client: RemotingClient, group: str, topic: str) -> None:
    """Let a subscription filter as its client last said, unless it does. Raises CallRefused.

    A message that the former filter passes over never comes again, so nothing is claimed before.
    """
    one = (group, topic)
    while one in client.unready:
        member = client.consumers.get(group)
        if member is None or member.broadcasting or topic not in member.filters:
            client.unready.discard(one)
            return
        filters, name = member.filters[topic], subscription_of(group, topic_of(topic))
        await subscriptions.filter_by(name, topic_of(topic), client.keys, filters, member.start)
        said = client.consumers.get(group)
        if said is not None and said.filters.get(topic, filters) == filters:
            client.unready.discard(one)
        else:
            # The client said something else meanwhile, and another request may have stored that before this one.
            client.unready.add(one)
