"""Generate messages with topics, keys, tags, headers, bodies and offsets."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from spark.synthetic.columns import NONE, Bools, Floats, Ints
from spark.synthetic.plan import OWN_TOPIC, Plan, topics_of
from spark.synthetic.transactions import OWN, Transactions

TAGS = ("audit", "web", "app", "legal")
AUDIT = 0
# In the text format of Postgres's jsonb.
HEADERS = ('{"region": "eu"}', '{"region": "us"}', '{"trace": "4bf92f35", "region": "eu"}')
EUROPEAN = (0, 2)
KEYS = 100_000
LONGEST_DELAY_S = 3600


@dataclass
class Messages:
    """Columns of a chunk's messages, by transaction and position. Faults change them.

    `of` is the transaction's place in the chunk; `to` is the subscription whose topic the message has (NONE: a message
    of the service itself); `key`, `tag`, `headers` are codes or NONE; `delay_s` is NaN without a delay; `offset`,
    `committed` and `due` are NONE if the message was not published.
    """

    of: Ints
    position: Ints
    to: Ints
    topic: Ints
    topics: list[str]
    key: Ints
    tag: Ints
    headers: Ints
    delay_s: Floats
    number: Ints
    offset: Ints
    committed: Ints
    due: Ints

    @property
    def published(self) -> Bools:
        """Whether each message is in the outbox."""
        found: Bools = self.offset != NONE
        return found


def generate_messages(plan: Plan, chunk: int, made: Transactions, rng: np.random.Generator) -> Messages:
    """Return the messages of a chunk's transactions."""
    of = np.repeat(np.arange(len(made.sizes)), made.sizes)
    count = len(of)
    position = np.arange(count) - np.repeat(np.cumsum(made.sizes) - made.sizes, made.sizes)
    own = made.outcome[of] == OWN
    to = rng.integers(0, len(plan.ids), size=count)
    topic = 2 * to + rng.integers(0, 2, size=count)
    topic[own], to[own] = 2 * len(plan.ids), NONE
    delay_s = np.where((rng.random(count) < 0.01) & ~own, rng.integers(5, LONGEST_DELAY_S, size=count), np.nan)
    committed = np.where(made.verdict[of] == 1, made.committed[of], NONE)
    # The outbox is in order of commits, and the messages of a transaction are adjacent.
    place = np.cumsum(committed != NONE) - 1 + plan.first_offset + chunk * plan.offsets
    due = committed + (np.nan_to_num(delay_s) * 1e6).astype(np.int64)
    return Messages(
        of=of,
        position=position,
        to=to,
        topic=topic,
        topics=[topic for number in range(len(plan.ids)) for topic in topics_of(number)] + [OWN_TOPIC],
        key=np.where(rng.random(count) < 0.7, (rng.random(count) ** 3 * KEYS).astype(np.int64), NONE),
        tag=np.where(own, NONE, _tags(to, rng)),
        headers=np.where(own, NONE, _headers(to, rng)),
        delay_s=delay_s,
        number=np.arange(count) + chunk * plan.offsets,
        offset=np.where(committed != NONE, place, NONE),
        committed=committed,
        due=np.where((committed != NONE) & ~np.isnan(delay_s), due, NONE),
    )


def _tags(to: Ints, rng: np.random.Generator) -> Ints:
    """Return tags with which a subscription with a tag filter gets all of its own topics and a part of another's."""
    luck = rng.random(len(to))
    usual = np.select([luck < 0.1, luck < 0.3, luck < 0.4], [AUDIT, 1, 2], NONE)
    # These messages all have a subscriber, so no fault that needs an unsubscribed message uses them.
    return np.where(to % 4 == 2, np.where(luck < 0.3, 3, AUDIT), usual)


def _headers(to: Ints, rng: np.random.Generator) -> Ints:
    """Return headers with which a subscription by header gets all of its own topics and a part of another's."""
    luck = rng.random(len(to))
    usual = np.select([luck < 0.1, luck < 0.2], [0, 1], NONE)
    return np.where(to % 4 == 3, np.where(luck < 0.5, 0, 2), usual)


def bodies(messages: Messages) -> list[str]:
    """Return the messages' bodies, all different: JSON in ASCII."""
    return [
        f'{{"order":{n},"customer":{n * 7919 % KEYS},"amount":"{n % 977}.{n % 100:02}","note":"leave it at the door"}}'
        for n in messages.number.tolist()
    ]


def digests(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Return the SHA-256 of each body: shape (n, 32)."""
    return np.frombuffer(b"".join([sha256(text.encode()).digest() for text in texts]), dtype=np.uint8).reshape(-1, 32)
