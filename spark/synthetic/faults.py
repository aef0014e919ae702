"""Plant faults in a chunk: each causes one finding of its kind and none of another kind.

A fault changes a plain transaction: one message that was delivered at once, or a rollback without check-back. No
transaction has two faults.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spark.synthetic.columns import NONE, Ints, id_texts
from spark.synthetic.deliveries import FIRST, Deliveries
from spark.synthetic.messages import Messages
from spark.synthetic.plan import MAX_CHECKS, MOST, Plan, refused_group
from spark.synthetic.transactions import BACK_BY_POLICY, COMMITTED, IMMUNITY_US, INTERVAL_US, ROLLED_BACK, Transactions


class TooFewError(Exception):
    """The plan has too few transactions for its faults."""


@dataclass
class Planted:
    """The planted faults: subjects by kind, and rows that no column of the chunk can hold.

    `parked`, `refused`: places of transactions; `doubled`: (message's place, offset); `received`: (message's place,
    subscription's number, offset). Only for ledgers: `disagreeing`, `unsent` (transactions); `unconsumed`, `twice`,
    `consumed_unsent` (messages).
    """

    subjects: dict[str, list[str]] = field(default_factory=dict)
    parked: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    doubled: list[tuple[int, int]] = field(default_factory=list)
    received: list[tuple[int, int, int]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    disagreeing: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    unconsumed: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    consumed_unsent: list[int] = field(default_factory=list)


@dataclass
class Ground:
    """A chunk in which faults are planted; `spare` is the next unused offset."""

    plan: Plan
    made: Transactions
    messages: Messages
    deliveries: Deliveries
    planted: Planted
    spare: int

    def id_of(self, place: int) -> str:
        """Return the id of the transaction of a message."""
        text: str = id_texts(self.made.ids[self.messages.of[place]][None, :])[0].as_py()
        return text

    def message_id(self, place: int) -> str:
        """Return the id of a message."""
        return f"{self.id_of(place)}-{self.messages.position[place]}"

    def deliveries_of(self, place: int) -> Ints:
        """Return the places of a message's deliveries."""
        begin, end = np.searchsorted(self.deliveries.of[: self.live], [place, place + 1])
        return np.arange(begin, end)

    @property
    def live(self) -> int:
        """The number of live deliveries; they come first, in order of the outbox."""
        return int((self.deliveries.replay == 0).sum())

    def next_offset(self) -> int:
        """Return an unused offset, higher than all offsets of the chunk."""
        self.spare += 1
        return self.spare - 1


def plant(plan: Plan, chunk: int, made: Transactions, messages: Messages, deliveries: Deliveries) -> Planted:
    """Plant the chunk's faults. Raises TooFewError if the chunk has too few transactions for them."""
    spare = plan.first_offset + chunk * plan.offsets + MOST
    ground = Ground(plan, made, messages, deliveries, Planted(), spare)
    faults = plan.faults_of(chunk)
    if not faults:
        return ground.planted
    rng = np.random.default_rng([plan.seed, plan.day.toordinal(), chunk, 1])
    plain, back = _plain(ground), _rolled_back(ground)
    victims = {False: iter(rng.permutation(plain)), True: iter(rng.permutation(back))}
    for fault in faults:
        kind = plan.kind_of(fault)
        fits = _FITS.get(kind, _any)
        place = next((int(place) for place in victims[kind in _ON_ROLLED_BACK] if fits(ground, int(place))), None)
        if place is None:
            raise TooFewError(f"{len(faults)} faults in {plan.size_of(chunk)} transactions are too many.")
        subject = _PLANTS[kind](ground, place, fault)
        ground.planted.subjects.setdefault(kind, []).append(subject)
    return ground.planted


def _plain(ground: Ground) -> Ints:
    """Return the places of messages that can get a fault: every second one, so that the next message stays intact."""
    messages, deliveries, made = ground.messages, ground.deliveries, ground.made
    touched = np.zeros(len(messages.of), dtype=bool)
    touched[deliveries.of[(deliveries.outcome != FIRST) | (deliveries.replay != 0)]] = True
    plain = (made.outcome[messages.of] == COMMITTED) & (made.sizes[messages.of] == 1)
    plain &= np.isnan(messages.delay_s) & ~touched
    # The fault needs an earlier message, so the first messages are left out.
    return np.flatnonzero(plain)[5::2]


def _rolled_back(ground: Ground) -> Ints:
    messages, made = ground.messages, ground.made
    return np.flatnonzero((made.outcome[messages.of] == ROLLED_BACK) & (made.sizes[messages.of] == 1))


def _op_without_half(ground: Ground, place: int, _: int) -> str:
    ground.made.has_half[ground.messages.of[place]] = False
    return ground.id_of(place)


def _half_stuck(ground: Ground, place: int, _: int) -> str:
    ground.made.has_op[ground.messages.of[place]] = False
    return ground.id_of(place)


def _committed_not_published(ground: Ground, place: int, _: int) -> str:
    ground.messages.offset[place] = NONE
    ground.deliveries.kept[ground.deliveries_of(place)] = False
    return ground.id_of(place)


def _published_without_commit(ground: Ground, place: int, _: int) -> str:
    transaction = ground.messages.of[place]
    ground.made.has_op[transaction] = ground.made.has_half[transaction] = False
    return ground.message_id(place)


def _published_after_rollback(ground: Ground, place: int, _: int) -> str:
    ground.made.verdict[ground.messages.of[place]] = 2
    return ground.message_id(place)


def _offset_of_two_messages(ground: Ground, place: int, _: int) -> str:
    messages = ground.messages
    before = _before(messages, place)
    messages.offset[place], messages.committed[place] = messages.offset[before], messages.committed[before]
    return str(messages.offset[place])


def _message_with_two_offsets(ground: Ground, place: int, _: int) -> str:
    ground.planted.doubled.append((place, ground.next_offset()))
    return ground.message_id(place)


def _offsets_contradict_time(ground: Ground, place: int, _: int) -> str:
    messages = ground.messages
    messages.committed[place] = messages.committed[_before(messages, place)] - 1_000_000
    return str(messages.offset[place])


def _unrouted(ground: Ground, place: int, fault: int) -> str:
    messages = ground.messages
    messages.topic[place] = len(messages.topics)
    messages.topics.append(f"gen-unsubscribed-{fault}.placed")
    ground.deliveries.kept[ground.deliveries_of(place)] = False
    return messages.topics[-1]


def _undelivered(ground: Ground, place: int, _: int) -> str:
    first = ground.deliveries_of(place)[0]
    ground.deliveries.kept[first] = False
    return f"{ground.message_id(place)}:{ground.plan.ids[ground.deliveries.to[first]]}"


def _receipt_without_message(ground: Ground, place: int, _: int) -> str:
    to = int(ground.messages.to[place])
    ground.planted.received.append((place, to, ground.next_offset()))
    return f"{ground.message_id(place)}:{ground.plan.ids[to]}"


def _receipt_not_matched(ground: Ground, place: int, _: int) -> str:
    messages, taken = ground.messages, ground.deliveries.to[ground.deliveries_of(place)]
    to = next(number for number in range(len(ground.plan.ids)) if number not in taken)
    ground.planted.received.append((place, to, int(messages.offset[place])))
    return f"{ground.message_id(place)}:{ground.plan.ids[to]}"


def _content_differs(ground: Ground, place: int, _: int) -> str:
    ground.deliveries.wrong[ground.deliveries_of(place)[0]] = True
    return ground.message_id(place)


def _parked(ground: Ground, place: int, _: int) -> str:
    transaction = int(ground.messages.of[place])
    ground.made.has_op[transaction] = False
    ground.planted.parked.append(transaction)
    return ground.id_of(place)


def _checks_beyond_max(ground: Ground, place: int, _: int) -> str:
    made, transaction = ground.made, ground.messages.of[place]
    checks = MAX_CHECKS + 2
    made.outcome[transaction], made.source[transaction], made.checks[transaction] = BACK_BY_POLICY, 2, checks
    made.decided[transaction] = made.born[transaction] + IMMUNITY_US + checks * INTERVAL_US
    return ground.id_of(place)


def _verdict_refused(ground: Ground, place: int, fault: int) -> str:
    transaction, name = int(ground.messages.of[place]), refused_group(fault)
    ground.planted.refused.append(transaction)
    ground.planted.groups.append(name)
    # After the groups of all, and the service's own.
    ground.made.group[transaction] = -len(ground.planted.groups)
    return name


def _ledger_disagrees(ground: Ground, place: int, _: int) -> str:
    ground.planted.disagreeing.append(int(ground.messages.of[place]))
    return ground.id_of(place)


def _ledger_not_sent(ground: Ground, place: int, _: int) -> str:
    transaction = int(ground.messages.of[place])
    ground.made.has_half[transaction] = ground.made.has_op[transaction] = False
    ground.planted.unsent.append(transaction)
    return ground.id_of(place)


def _never_consumed(ground: Ground, place: int, _: int) -> str:
    ground.planted.unconsumed.append(place)
    return ground.message_id(place)


def _consumed_twice(ground: Ground, place: int, _: int) -> str:
    ground.planted.twice.append(place)
    return ground.message_id(place)


def _consumed_not_sent(ground: Ground, place: int, _: int) -> str:
    ground.planted.consumed_unsent.append(place)
    return ground.message_id(place)


def _any(ground: Ground, place: int) -> bool:
    return True


def _not_by_header(ground: Ground, place: int) -> bool:
    """Without its half, it is unknown whether a subscription with a header filter takes a message."""
    return not (ground.deliveries.to[ground.deliveries_of(place)] % 4 == 3).any()


def _before(messages: Messages, place: int) -> int:
    """Return the place of the previous message in the outbox."""
    return int(np.flatnonzero(messages.published[:place])[-1])


_PLANTS: dict[str, Callable[[Ground, int, int], str]] = {
    "op_without_half": _op_without_half,
    "half_stuck": _half_stuck,
    "committed_not_published": _committed_not_published,
    "published_without_commit": _published_without_commit,
    "published_after_rollback": _published_after_rollback,
    "offset_of_two_messages": _offset_of_two_messages,
    "message_with_two_offsets": _message_with_two_offsets,
    "offsets_contradict_time": _offsets_contradict_time,
    "unrouted": _unrouted,
    "undelivered": _undelivered,
    "receipt_without_message": _receipt_without_message,
    "receipt_not_matched": _receipt_not_matched,
    "content_differs": _content_differs,
    "parked": _parked,
    "checks_beyond_max": _checks_beyond_max,
    "verdict_refused": _verdict_refused,
    "ledger_disagrees": _ledger_disagrees,
    "ledger_not_sent": _ledger_not_sent,
    "never_consumed": _never_consumed,
    "consumed_twice": _consumed_twice,
    "consumed_not_sent": _consumed_not_sent,
}
_ON_ROLLED_BACK = frozenset(
    """
op_without_half half_stuck receipt_without_message parked checks_beyond_max ledger_not_sent consumed_not_sent
""".split()  # noqa: SIM905 -- a list of names reads better so
)
_FITS: dict[str, Callable[[Ground, int], bool]] = {"published_without_commit": _not_by_header}
