"""What transactions want to tell: messages with topics, keys, tags, headers and bodies, and their places in the log."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from spark.generating.columns import NONE, Bools, Floats, Ints
from spark.generating.plan import OWN_TOPIC, Plan, topics_of
from spark.generating.transactions import OWN, Transactions

TAGS = ("audit", "web", "app", "legal")
AUDIT = 0
# As Postgres prints jsonb.
HEADERS = ('{"region": "eu"}', '{"region": "us"}', '{"trace": "4bf92f35", "region": "eu"}')
EUROPEAN = (0, 2)
KEYS = 100_000
LONGEST_DELAY_S = 3600


@dataclass
class Messages:
    """Columns of a chunk's messages, by transaction and position. Faults change them.

    `of` is the transaction's place in the chunk, `to` the subscription whose topic it has (NONE: the service's own
    message), `key`, `tag`, `headers` are codes or NONE, `delay_s` is NaN without a delay; `offset`, `committed` and
    `due` are NONE for what was never published.
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
        """Which ones are in the outbox."""
        found: Bools = self.offset != NONE
        return found


def messages(plan: Plan, chunk: int, made: Transactions, rng: np.random.Generator) -> Messages:
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
    # The log is in order of commits, and a transaction's messages are neighbours.
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
    """Return tags such that a subscription by tag gets all of its own topics, and a part of another's."""
    luck = rng.random(len(to))
    usual = np.select([luck < 0.1, luck < 0.3, luck < 0.4], [AUDIT, 1, 2], NONE)
    # One that no subscription asks for would find nobody among them.
    return np.where(to % 4 == 2, np.where(luck < 0.3, 3, AUDIT), usual)


def _headers(to: Ints, rng: np.random.Generator) -> Ints:
    """Return headers such that a subscription by header gets all of its own topics, and a part of another's."""
    luck = rng.random(len(to))
    usual = np.select([luck < 0.1, luck < 0.2], [0, 1], NONE)
    return np.where(to % 4 == 3, np.where(luck < 0.5, 0, 2), usual)


def bodies(messages: Messages) -> list[str]:
    """Return the messages' bodies, no two alike: JSON in ASCII."""
    return [
        f'{{"order":{n},"customer":{n * 7919 % KEYS},"amount":"{n % 977}.{n % 100:02}","note":"leave it at the door"}}'
        for n in messages.number.tolist()
    ]


def digests(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Return SHA-256 of each body: shape (n, 32)."""
    return np.frombuffer(b"".join([sha256(text.encode()).digest() for text in texts]), dtype=np.uint8).reshape(-1, 32)
