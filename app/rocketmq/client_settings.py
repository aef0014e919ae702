"""The settings that a client gets when it connects, as RocketMQ's proxy gives them."""

from collections.abc import Mapping
from typing import Any

from app.rocketmq.answer_sizes import BATCH_MAX
from app.rocketmq.consuming import POLL_MOST_S
from app.rocketmq.protocol.definition_pb2 import CustomizedBackoff, ExponentialBackoff, Metric, RetryPolicy, Settings

SEND_ATTEMPTS = 3
SEND_BACKOFF_MS, SEND_BACKOFF_MOST_MS, SEND_MULTIPLIER = 10, 1000, 2.0


def producer_settings(given: Settings, body_limit: int) -> Settings:
    """Return a producer's own settings, with those of the server. `body_limit`: bytes."""
    settings = _copy(given)
    backoff = ExponentialBackoff(multiplier=SEND_MULTIPLIER)
    backoff.initial.FromMilliseconds(SEND_BACKOFF_MS)
    backoff.max.FromMilliseconds(SEND_BACKOFF_MOST_MS)
    settings.backoff_policy.CopyFrom(RetryPolicy(max_attempts=SEND_ATTEMPTS, exponential_backoff=backoff))
    settings.publishing.max_body_size = body_limit
    settings.publishing.validate_message_type = True
    return settings


def consumer_settings(given: Settings, shape: Mapping[str, Any]) -> Settings:
    """Return a consumer's own settings, with those of its subscription in Halfnote."""
    settings = _copy(given)
    retry: list[float] = shape["retry"]
    backoff = CustomizedBackoff()
    for seconds in retry or [0.0]:
        backoff.next.add().FromMilliseconds(round(seconds * 1000))
    settings.backoff_policy.CopyFrom(RetryPolicy(max_attempts=len(retry) + 1, customized_backoff=backoff))
    settings.subscription.fifo = shape["ordered"] == "key"
    settings.subscription.receive_batch_size = BATCH_MAX
    settings.subscription.long_polling_timeout.FromMilliseconds(round(POLL_MOST_S * 1000))
    return settings


def _copy(given: Settings) -> Settings:
    settings = Settings()
    settings.CopyFrom(given)
    settings.metric.CopyFrom(Metric(on=False))
    return settings
