"""Requests of producers: messages, halves and ends."""

from uuid import UUID

from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.codes import RemotingRefused, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.names import RETRY, is_system, producer_group_of, topic_of
from app.rocketmq.remoting.requests import RemotingCall
from app.rocketmq.remoting.sending_back import SendingBack
from app.rocketmq.remoting.sent_messages import send_fields, sent_messages
from app.rocketmq.remoting.store_format import message_id
from app.rocketmq.remoting.transaction_places import places_of, transaction_at
from app.rocketmq.storing import StoredSend, Storing

# Kinds of ends: two bits of a message's flags.
_VERDICTS = {8: "commit", 12: "rollback"}


class RemotingProducing:
    """Stores what clients send. `body_limit`: bytes of one message."""

    def __init__(self, storing: Storing, sending_back: SendingBack, body_limit: int) -> None:
        self._storing, self._sending_back, self._body_limit = storing, sending_back, body_limit

    async def send(self, call: RemotingCall) -> RemotingFrame:
        """Store a message or a batch. Raises CallRefused, RemotingRefused."""
        fields = send_fields(call.frame)
        if fields.topic.startswith(RETRY):
            return await self._sending_back.by_handle(call, fields)
        if is_system(fields.topic):
            raise RemotingRefused(ResultCode.TOPIC_NOT_EXIST, f"Halfnote has no topic `{fields.topic}`.")
        topic, group = topic_of(fields.topic), producer_group_of(fields.producer_group)
        messages = sent_messages(call.frame, fields, topic, self._body_limit)
        client = call.connection.client
        if client is not None and group in client.producers and any(one.transactional for one in messages):
            client.sends_transactions.add(group)
        # A batch that was stored in part is sent again as a whole, and no message of it is stored twice.
        stored = await self._storing.store_all(group, topic, messages, call.keys)
        places = [_place(kept, transactional=one.transactional) for one, kept in zip(messages, stored, strict=True)]
        answer = {
            "msgId": ",".join(message_id(call.connection.host, position) for position, _ in places),
            "queueId": fields.queue_id,
            "queueOffset": places[0][1],
            "transactionId": messages[0].message_id,
        }
        return call.frame.answered(ResultCode.SUCCESS, fields=answer)

    async def end(self, call: RemotingCall) -> RemotingFrame:
        """Record a verdict. An unknown one changes nothing, unless it answers a check. Raises CallRefused."""
        transaction = transaction_at(call.number("commitLogOffset"), call.number("tranStateTableOffset"))
        if transaction is None:
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, "The two offsets are of no transaction.")
        group = producer_group_of(call.text("producerGroup"))
        verdict = _VERDICTS.get(call.number("commitOrRollback", 0), "unknown")
        checked = call.frame.fields.get("fromTransactionCheck") == "true"
        if verdict != "unknown" or checked:
            await self._storing.end(group, transaction, verdict, call.keys, checked=checked)
        return call.frame.answered(ResultCode.SUCCESS)


def _place(stored: StoredSend | CallRefused, *, transactional: bool) -> tuple[int, int]:
    """Return the position in the commit log and in the queue. Those of a half name its transaction.

    Raises CallRefused if the message was refused.
    """
    if isinstance(stored, CallRefused):
        raise stored
    return places_of(UUID(stored.transaction_id)) if transactional else (stored.offset, stored.offset)
