"""The words that rows and answers share: verdicts, their sources, and the states of a transaction."""

from enum import IntEnum, StrEnum


class Verdict(IntEnum):
    """A recorded verdict, as stored in `op.verdict`. There is no `unknown`: it is never recorded."""

    COMMIT = 1
    ROLLBACK = 2

    @property
    def word(self) -> str:
        """The verdict as HTTP spells it."""
        return self.name.lower()


class Source(IntEnum):
    """The source of a verdict, as stored in `op.source`."""

    PRODUCER = 0
    CHECK = 1
    POLICY = 2
    OPERATOR = 3

    @property
    def word(self) -> str:
        """The source as HTTP spells it."""
        return self.name.lower()


# Keyed by the stored value. Reading an enumeration's member takes ten times as long, and every End needs two words.
VERDICT_WORDS: dict[int, str] = {verdict: verdict.word for verdict in Verdict}
SOURCE_WORDS: dict[int, str] = {source: source.word for source in Source}
# From the stored value, also None, to the member. A lookup takes a fraction of the time of a call of the enumeration.
VERDICT_OF: dict[int | None, Verdict | None] = {None: None, **{verdict.value: verdict for verdict in Verdict}}
SOURCE_OF: dict[int | None, Source | None] = {None: None, **{source.value: source for source in Source}}


class State(StrEnum):
    """The state of a transaction (docs/protocol.md)."""

    HALF = "half"
    IN_DOUBT = "in_doubt"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


class CheckBackState(IntEnum):
    """`check_back.state`. Policy decides only transactions in doubt. A person or the producer decides parked ones."""

    IN_DOUBT = 1
    PARKED = 2


CHECK_BACK_STATE_OF: dict[int | None, CheckBackState | None] = {
    None: None,
    **{one.value: one for one in CheckBackState},
}


class AttemptKind(StrEnum):
    """The kind of an `attempt` row."""

    CHECK = "check"
    DELIVERY = "delivery"
    REFUSED = "refused"
    SWEPT = "swept"
    PARKED = "parked"


class CheckOutcome(StrEnum):
    """`attempt.outcome` of a check. LOST: the producer answered with a verdict, and another one was recorded before."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"
    UNANSWERED = "unanswered"
    LOST = "lost"


class DeliveryOutcome(StrEnum):
    """`attempt.outcome` of a delivery that did not deliver. Only FAILED and REFUSED use up a try.

    REFUSED: the destination refuses the message. GONE: it refuses all messages. POSTPONED: it asked for a pause.
    PROBE: the circuit breaker was open.
    """

    FAILED = "failed"
    REFUSED = "refused"
    POSTPONED = "postponed"
    GONE = "gone"
    PROBE = "probe"


class DeliveryState(StrEnum):
    """The state of a delivery. DELIVERED and DROPPED are stored as `receipt.outcome`."""

    DELIVERED = "delivered"
    WAITING = "waiting"
    IN_RETRY = "in_retry"
    DEAD = "dead"
    DROPPED = "dropped"


class DeliveryReason(StrEnum):
    """Why a subscription has got a message, or has not. NO_SUBSCRIPTION is of the message, the others of a delivery."""

    DELIVERED = "delivered"
    DROPPED = "dropped"
    DEAD = "dead"
    EXPIRED = "expired"
    NO_SUBSCRIPTION = "no_subscription"
    NO_TOPIC_MATCH = "no_topic_match"
    FILTERED_BY_TAG = "filtered_by_tag"
    FILTERED_BY_HEADER = "filtered_by_header"
    # The transaction has no commit. The words are those of its state.
    HALF = "half"
    IN_DOUBT = "in_doubt"
    PARKED = "parked"
    ROLLED_BACK = "rolled_back"
    SUBSCRIPTION_NEWER = "subscription_newer"
    CHANGED_SINCE = "changed_since"
    NO_RECORD = "no_record"
    PAUSED = "paused"
    DISABLED = "disabled"
    NO_WORKER = "no_worker"
    BREAKER_OPEN = "breaker_open"
    BEHIND_KEY = "behind_key"
    DUE_LATER = "due_later"
    IN_FLIGHT = "in_flight"
    RETRYING = "retrying"
    NOT_YET_SENT = "not_yet_sent"


class DeadLetterAction(StrEnum):
    """`redelivery.what`: a person's action on a dead letter."""

    REDELIVERED = "redelivered"
    DROPPED = "dropped"


class SubscriptionState(StrEnum):
    """`subscription.state`."""

    ACTIVE = "active"
    PAUSED = "paused"
    DISABLED = "disabled"


class Ordered(StrEnum):
    """`subscription.ordered`: the order of its messages."""

    NONE = "none"
    KEY = "key"


class OnDead(StrEnum):
    """`subscription.on_dead`: the effect of a dead letter on later messages of its key, if they are ordered."""

    RELEASE = "release"
    HOLD = "hold"


class DeadLetterReason(StrEnum):
    """`dead_letter.reason`, unless a destination gave its own: attempts used up, day removed, too old, too many."""

    RETRIES_EXHAUSTED = "retries_exhausted"
    DAY_LEFT = "day_left"
    EXPIRED = "expired"
    BACKLOG = "backlog"


class OnExhausted(StrEnum):
    """`producer_group.on_exhausted`: the policy's decision after `max_checks` answers of `unknown`."""

    ROLLBACK = "rollback"
    PARK = "park"


class Checks(StrEnum):
    """`producer_group.checks`: Halfnote only calls the group's check URLs, or producers may also claim the checks."""

    CALL = "call"
    CLAIM = "claim"


class BreakerState(StrEnum):
    """A subscription's circuit breaker, as HTTP spells it. An active subscription whose breaker is open shows OPEN."""

    CLOSED = "closed"
    OPEN = "open"


class ReplayState(StrEnum):
    """`replay.state`."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class RunState(StrEnum):
    """`reconciliation_run.state`: the result of a run of the nightly proof."""

    PROVED = "proved"
    FINDINGS = "findings"
    FAILED = "failed"


class ReconciledDayState(StrEnum):
    """`reconciliation_day.state`. Of a final day, only replays and redeliveries can still begin."""

    PROVISIONAL = "provisional"
    FINAL = "final"


class DayState(StrEnum):
    """`day.state`. Only an open day accepts verdicts and deliveries. The partitions of a gone day are dropped."""

    OPEN = "open"
    ARCHIVING = "archiving"
    GONE = "gone"
