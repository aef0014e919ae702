"""The plan of a generated day: its size, seed, subscriptions and faults."""

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

# The transactions that one worker generates at once. The number of workers does not change the day.
CHUNK = 25_000
# Decisions fall between 00:10 and 22:00, so that the day contains every birth and, with the delays, every delivery.
BEGINS_S, ENDS_S = 600, 79_200

GROUPS = ("gen-shop", "gen-billing", "gen-stock", "gen-mail", "gen-loyalty")
# The service's own operational messages.
OWN_GROUP = "halfnote"
OWN_TOPIC = "halfnote.delivery.dead"
INTERVAL_S, MAX_CHECKS, UNANSWERED_PARK_S = 30, 15, 3600
# The rules that the service stores when it migrates a database.
RULES = {
    "longest_backoff_s": 600.0,
    "longest_hold_s": 3600.0,
    "interval_s": 30.0,
    "max_checks": 15.0,
    "unanswered_park_s": 259_200.0,
}

# Kinds that break no constraint, and kinds that a primary key forbids.
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
# Kinds that need ledgers.
LEDGERS = ("ledger_disagrees", "ledger_not_sent", "never_consumed", "consumed_twice", "consumed_not_sent")
# The messages of a chunk have fewer offsets than this; faults use the offsets above.
MOST = CHUNK * 6 // 5


@dataclass(frozen=True)
class Subscription:
    """A generated subscription. Its topics contain its number; it also filters the topics of the number `also`."""

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
    """A day to generate. `ids` are the subscriptions' ids in their order; faults are spread over `kinds` in turn.

    `ledgers`: the directory for the ledgers of producers and consumers, if they are requested.
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
        """The number of chunks."""
        return -(-self.transactions // CHUNK)

    @property
    def begins_us(self) -> int:
        """The first µs of the day."""
        return int(datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC).timestamp()) * 1_000_000

    @property
    def subscribed_at(self) -> datetime:
        """The time at which the subscriptions were made: an hour before the day."""
        return datetime.fromtimestamp(self.begins_us / 1e6, UTC) - timedelta(hours=1)

    @property
    def offsets(self) -> int:
        """The most offsets of a chunk: one for each message, and some for faults."""
        return CHUNK * 5 // 4

    @property
    def attempts(self) -> int:
        """The most attempts of a chunk."""
        return CHUNK * 4

    @property
    def last_offset(self) -> int:
        """An offset that no message of the day exceeds."""
        return self.first_offset + self.chunks * self.offsets - 1

    @property
    def refused_groups(self) -> list[str]:
        """The producer groups of faults, one for each fault, so that each causes a separate finding."""
        return [refused_group(n) for n in range(self.faults) if self.kind_of(n) == "verdict_refused"]

    def subscriptions(self) -> list[Subscription]:
        """The subscriptions: by name of topic, prefix, tag and header, in turn."""
        return [_subscription(number) for number in range(len(self.ids))]

    def kind_of(self, fault: int) -> str:
        """Return the kind of a fault."""
        return self.kinds[fault % len(self.kinds)]

    def faults_of(self, chunk: int) -> list[int]:
        """Return the faults of a chunk; they are spread evenly."""
        return [n for n in range(self.faults) if n * self.chunks // self.faults == chunk]

    def size_of(self, chunk: int) -> int:
        """Return the number of transactions of a chunk."""
        return min(CHUNK, self.transactions - chunk * CHUNK)


def refused_group(fault: int) -> str:
    """Return the producer group of the transaction whose verdict a caller tried to change."""
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
