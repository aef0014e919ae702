"""What day is to be made: how much of it, from which seed, for which subscriptions, with which faults."""

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

# Made at once by one worker. A day is the same whatever number of workers make it.
CHUNK = 25_000
# Decisions fall between 00:10 and 22:00, so that the day holds every birth and, with the delays, every delivery.
BEGINS_S, ENDS_S = 600, 79_200

GROUPS = ("gen-shop", "gen-billing", "gen-stock", "gen-mail", "gen-loyalty")
# The service's own operational messages.
OWN_GROUP = "halfnote"
OWN_TOPIC = "halfnote.delivery.dead"
INTERVAL_S, MAX_CHECKS, UNANSWERED_PARK_S = 30, 15, 3600
# What rules need to know that the service writes down when it migrates a database.
RULES = {
    "longest_backoff_s": 600.0,
    "longest_hold_s": 3600.0,
    "interval_s": 30.0,
    "max_checks": 15.0,
    "unanswered_park_s": 259_200.0,
}

# What can be planted without breaking a constraint, and what a primary key forbids.
ALLOWED = (
    "op_without_half",
    "half_stuck",
    "committed_not_published",
    "published_without_commit",
    "published_after_rollback",
    "offset_of_two_messages",
    "offsets_contradict_time",
    "unrouted",
    "undelivered",
    "receipt_without_message",
    "receipt_not_matched",
    "content_differs",
    "parked",
    "checks_beyond_max",
    "verdict_refused",
)
FORBIDDEN = ("message_with_two_offsets",)
# What needs ledgers beside the day.
LEDGERS = ("ledger_disagrees", "ledger_not_sent", "never_consumed", "consumed_twice", "consumed_not_sent")
# Messages of a chunk have fewer offsets than this; those above are for what faults put where nothing was.
MOST = CHUNK * 6 // 5


@dataclass(frozen=True)
class Subscription:
    """A made subscription; its topics have its number in them, `also` is another number whose topics it looks at."""

    number: int
    topics: tuple[str, ...]
    filters: str | None = None
    shards: int = 1
    also: int | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return f"gen-{self.number}"


@dataclass(frozen=True)
class Plan:
    """A day to be made. `ids` are the subscriptions' ids in their order; faults are spread over `kinds` in turn.

    `ledgers`: below which directory producers and consumers say what they have, if they do.
    """

    day: date
    seed: int
    transactions: int
    faults: int = 0
    kinds: tuple[str, ...] = ALLOWED
    ids: tuple[int, ...] = (1, 2, 3, 4)
    first_offset: int = 1
    first_attempt: int = 1
    ledgers: Path | None = None
    seen_at: datetime = field(default=datetime.max.replace(tzinfo=UTC))

    @property
    def chunks(self) -> int:
        """How many parts it is made in."""
        return -(-self.transactions // CHUNK)

    @property
    def begins_us(self) -> int:
        """The first µs of the day."""
        return int(datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC).timestamp()) * 1_000_000

    @property
    def subscribed_at(self) -> datetime:
        """When the subscriptions were made: an hour before the day."""
        return datetime.fromtimestamp(self.begins_us / 1e6, UTC) - timedelta(hours=1)

    @property
    def offsets(self) -> int:
        """How many offsets a chunk may use: one for each message of it, and some for faults."""
        return CHUNK * 5 // 4

    @property
    def attempts(self) -> int:
        """How many attempts a chunk may have."""
        return CHUNK * 4

    @property
    def last_offset(self) -> int:
        """No message has a higher one."""
        return self.first_offset + self.chunks * self.offsets - 1

    @property
    def refused_groups(self) -> list[str]:
        """Producer groups that faults need, each its own, so that each is a finding of its own."""
        return [refused_group(n) for n in range(self.faults) if self.kind_of(n) == "verdict_refused"]

    def subscriptions(self) -> list[Subscription]:
        """The subscriptions: by name of topic, by prefix, by tag, by header, in turn."""
        return [_subscription(number) for number in range(len(self.ids))]

    def kind_of(self, fault: int) -> str:
        """Which kind a fault is of."""
        return self.kinds[fault % len(self.kinds)]

    def faults_of(self, chunk: int) -> list[int]:
        """Which faults a chunk has: they are spread evenly."""
        return [n for n in range(self.faults) if n * self.chunks // self.faults == chunk]

    def size_of(self, chunk: int) -> int:
        """How many transactions a chunk has."""
        return min(CHUNK, self.transactions - chunk * CHUNK)


def refused_group(fault: int) -> str:
    """Return the producer group of the transaction whose verdict somebody tried to flip."""
    return f"gen-refused-{fault}"


def topics_of(number: int) -> tuple[str, str]:
    """Return the topics whose messages are sent to a subscription."""
    return f"gen-{number}.placed", f"gen-{number}.changed"


def _subscription(number: int) -> Subscription:
    every = f"gen-{number}.*"
    match number % 4:
        case 0:
            return Subscription(number, topics_of(number))
        case 1:
            return Subscription(number, (every,), shards=2)
        case 2:
            other = number - 1
            return Subscription(number, (every, f"gen-{other}.*"), '{"tags": ["audit", "legal"]}', also=other)
        case _:
            other = number - 3
            return Subscription(number, (every, f"gen-{other}.*"), '{"headers": {"region": "eu"}}', also=other)
