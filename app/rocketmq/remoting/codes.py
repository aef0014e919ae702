"""Numbers of the remoting protocol: requests, and results."""

from enum import IntEnum

from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused


class RequestCode(IntEnum):
    """Requests that are served, and the two that the gateway sends."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    SEARCH_OFFSET = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    CHECK_CLIENT_CONFIG = 46
    GET_ROUTE = 105
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320


class ResultCode(IntEnum):
    """Results of requests."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_OFFSET_MOVED = 21
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24


class RemotingRefused(Exception):
    """A request is refused with a result of the remoting protocol."""

    def __init__(self, code: ResultCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


_BY_CODE = {
    Code.UNAUTHORIZED: ResultCode.NO_PERMISSION,
    Code.FORBIDDEN: ResultCode.NO_PERMISSION,
    Code.TOPIC_NOT_FOUND: ResultCode.TOPIC_NOT_EXIST,
    Code.ILLEGAL_TOPIC: ResultCode.MESSAGE_ILLEGAL,
    Code.CONSUMER_GROUP_NOT_FOUND: ResultCode.SUBSCRIPTION_NOT_EXIST,
    Code.ILLEGAL_FILTER_EXPRESSION: ResultCode.SUBSCRIPTION_PARSE_FAILED,
    Code.TOO_MANY_REQUESTS: ResultCode.SYSTEM_BUSY,
    # Clients send again to another broker, or to the same one.
    Code.PROXY_TIMEOUT: ResultCode.SERVICE_NOT_AVAILABLE,
    Code.MESSAGE_BODY_EMPTY: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_BODY_TOO_LARGE: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_PROPERTIES_TOO_LARGE: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_CORRUPTED: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_KEY: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_TAG: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_ID: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_PROPERTY_KEY: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_DELIVERY_TIME: ResultCode.MESSAGE_ILLEGAL,
    Code.PAYLOAD_TOO_LARGE: ResultCode.MESSAGE_ILLEGAL,
    Code.BAD_REQUEST: ResultCode.MESSAGE_ILLEGAL,
}


def remoting_refusal(refused: CallRefused) -> RemotingRefused:
    """Return a refusal as the remoting protocol says it."""
    return RemotingRefused(_BY_CODE.get(refused.code, ResultCode.SYSTEM_ERROR), refused.text)
