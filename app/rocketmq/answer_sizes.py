"""How many messages an answer to a consumer has at most, so that it arrives in the client's time over a slow link too.

The messages of an answer that does not arrive use up an attempt, and answers of the same size would not arrive either.
"""

from app.rocketmq.credentials import ApiKeys

BATCH_MAX = 32
# What the first answer brings: the size of its messages is not known yet.
FIRST_BATCH_MAX = 8
# Bytes of bodies that an answer is to bring, by the size of those before. RocketMQ's broker sends as many.
BATCH_BYTES = 256 * 1024
# Sizes that are kept for clients; then the one that was used longest ago is forgotten.
KEPT_MAX = 10_000


class AnswerSize:
    """The size of the next answer: one message after an answer that was lost, and more after each that arrives."""

    def __init__(self) -> None:
        self._most, self._body_bytes = FIRST_BATCH_MAX, 1

    @property
    def most(self) -> int:
        """How many messages the next answer has at most."""
        return max(1, min(self._most, BATCH_BYTES // self._body_bytes))

    def sent(self, messages: int, body_bytes: int) -> None:
        """Note what was sent. `body_bytes`: of all bodies in it."""
        self._body_bytes = max(1, body_bytes // max(1, messages))

    def arrived(self) -> None:
        """Note that the client has got the last answer."""
        self._most = min(2 * self._most, BATCH_MAX)

    def lost(self) -> None:
        """Note that the client has not got the last answer."""
        self._most = 1


class AnswerSizes:
    """Sizes by client and subscription, also of clients whose streams are at another gateway."""

    def __init__(self) -> None:
        # By hash: a client chooses the length of its id, and two of one hash only get fewer messages at a time.
        self._kept: dict[int, AnswerSize] = {}

    def of(self, client_id: str, keys: ApiKeys, subscription: str) -> AnswerSize:
        """Return the size of the next answer to a client."""
        known_as = hash((client_id, keys, subscription))
        size = self._kept[known_as] = self._kept.pop(known_as, AnswerSize())
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        return size
