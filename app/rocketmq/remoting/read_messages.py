"""Messages of Halfnote as remoting clients read them."""

from collections.abc import Mapping
from datetime import datetime

import structlog

from app.rocketmq import headers as names
from app.rocketmq.receiving import ClaimedDelivery, ClaimedOrphan, MessageFields
from app.rocketmq.remoting.names import namespaced
from app.rocketmq.remoting.sent_messages import HANDLE, SHARDING_KEY
from app.rocketmq.remoting.store_format import PROPERTIES_MOST_BYTES, LogMessage, properties_text
from app.rocketmq.remoting.transaction_places import places_of

log = structlog.get_logger(__name__)


def claimed_message(one: ClaimedDelivery, topic: str, queue_id: int, queue_offset: int, position: int) -> LogMessage:
    """Return a message for a consumer, in the queue and at the offset under which the client knows it."""
    properties = {**_properties(one), HANDLE: one.handle}
    stored = _ms(one.committed_at)
    return LogMessage(
        topic, one.content, properties, queue_id, queue_offset, position, stored, stored, max(0, one.attempt - 1)
    )


def orphaned_message(check: ClaimedOrphan, group: str) -> LogMessage:
    """Return the message of a transaction for its producer's listener. `group`: as the client knows it."""
    one = check.messages[0]
    properties = {**_properties(one), "TRAN_MSG": "true", "PGROUP": group}
    position, queue_position = places_of(check.transaction_id)
    born = _ms(check.born_at)
    topic = namespaced(one.topic, group)
    return LogMessage(topic, one.content, properties, 0, queue_position, position, born, born)


def message_id_of(one: MessageFields) -> str:
    """Return the id of a message: its client's own, or Halfnote's."""
    return one.headers.get(names.MESSAGE_ID) or one.message_id


def _properties(one: MessageFields) -> dict[str, str]:
    own: Mapping[str, str] = names.to_properties(one.headers)
    system = {"UNIQ_KEY": message_id_of(one)}
    if keys := names.to_keys(one.headers, one.key):
        system["KEYS"] = " ".join(keys)
    if one.tag:
        system["TAGS"] = one.tag
    if group := one.headers.get(names.GROUP):
        system[SHARDING_KEY] = group
    if one.headers.get(names.TYPE) == names.TRANSACTION_WORD:
        system["TRAN_MSG"] = "true"
    properties = {**own, **system}
    # A handle and a group are added.
    if len(properties_text(properties).encode()) > PROPERTIES_MOST_BYTES - 1024:
        log.warning("rocketmq_properties_left_out", message_id=one.message_id, topic=one.topic)
        return system
    return properties


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
