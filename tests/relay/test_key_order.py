"""Which message of a key is sent when, for any order of outcomes: a model against lists."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.relay.key_order import DEFERRED_MOST, HELD_MOST, Admission, KeyOrder
from app.store.relay.log import WINDOW_BYTES, Outgoing
from tests.support.examples import examples

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


def message(offset: int, key: str | None, claim: int | None = None) -> Outgoing:
    return Outgoing(
        offset, UUID(int=offset), 0, "order", key, None, None, AT, "shop", "{}", "text/plain", b"body", claim=claim
    )


class KeysModel(RuleBasedStateMachine):
    """A stream: messages are read, sent, settled, postponed, stored, claimed and sent again.

    Those that wait lose their bodies and get them back. Some are delayed, and the stream loses its lease: the next
    holder reads again from before the first message that is not settled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys = KeyOrder({})
        # The end of the log, and how far the holder has read it.
        self.offset = self.position = 0
        # Delayed messages, and those of them that are not due.
        self.delayed: set[int] = set()
        self.early: set[int] = set()
        self.sent: dict[str, list[int]] = {}
        self.in_flight: list[Outgoing] = []
        # The rows of delivery_retry (offset → key), and which of them are claimed.
        self.stored: dict[int, str] = {}
        self.claimed: set[int] = set()
        self.done: dict[str, list[int]] = {}
        self.removed: set[int] = set()
        self.key_of: dict[int, str] = {}
        self.asked: list[int] = []

    def send(self, *messages: Outgoing | None) -> None:
        for one in messages:
            if one is not None:
                self.in_flight.append(one)
                self.sent.setdefault(str(one.key), []).append(one.offset)

    @rule(keys=st.text("ab", min_size=1, max_size=3))
    def reads(self, keys: str) -> None:
        for key in keys:
            self.read(key)

    def read(self, key: str) -> None:
        self.position += 1
        if self.position > self.offset:
            self.offset = self.position
            self.key_of[self.offset] = key
        one = message(self.position, self.key_of[self.position])
        settled = self.removed.union(*self.done.values(), self.stored)
        if one.offset not in settled:
            match self.keys.admit(one):
                case Admission.GO:
                    self.send(one)
                case Admission.HOLD:
                    self.stored[one.offset] = str(one.key)
        self.keys.reach(self.position)

    @precondition(lambda self: self.position == self.offset)
    @rule(key=st.sampled_from("ab"))
    def reads_a_delayed_one(self, key: str) -> None:
        self.offset = self.position = self.offset + 1
        self.key_of[self.offset] = self.stored[self.offset] = key
        self.delayed.add(self.offset)
        self.early.add(self.offset)
        self.keys.reach(self.position)

    @precondition(lambda self: self.early)
    @rule(data=st.data())
    def is_due(self, data: st.DataObject) -> None:
        self.early.remove(data.draw(st.sampled_from(sorted(self.early))))

    @rule()
    def loses_its_lease(self) -> None:
        self.claimed.clear()
        self.in_flight.clear()
        self.asked = []
        settled = self.removed.union(*self.done.values(), self.stored)
        self.position = next(n for n in range(self.offset + 1) if n + 1 not in settled or n == self.offset)
        stored: dict[str, list[int]] = {}
        for offset in self.stored.keys() - self.early:
            stored.setdefault(self.stored[offset], []).append(offset)
        self.keys = KeyOrder(stored, reached=self.position)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def succeeds(self, data: st.DataObject) -> None:
        one = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.done.setdefault(str(one.key), []).append(one.offset)
        self.stored.pop(one.offset, None)
        self.claimed.discard(one.offset)
        following, back = self.keys.settled(one)
        assert not back
        self.send(following)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        one = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        for back in (one, *self.keys.postponed(one)):
            # A claimed message whose row is removed is not stored again.
            if back.claim is None or back.offset in self.stored:
                self.stored[back.offset] = str(back.key)
            self.claimed.discard(back.offset)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def upkeep_removes(self, data: st.DataObject) -> None:
        """Claimed rows are among them, whose messages are in flight or wait in memory."""
        for offset in data.draw(st.sets(st.sampled_from(sorted(self.stored)))):
            del self.stored[offset]
            self.claimed.discard(offset)
            self.removed.add(offset)
        self.keys.removed(self.keys.stored_offsets() - self.stored.keys())

    @rule(key=st.sampled_from("ab"), limit=st.integers(1, 3))
    def claim(self, key: str, limit: int) -> None:
        """Claim as the statement does: the lowest due offsets of a key that were read, up to one that is claimed."""
        due = {offset for offset, stored_key in self.stored.items() if stored_key == key} - self.early
        rows = sorted(offset for offset in due if offset <= self.position)
        for offset in list(takewhile(lambda offset: offset not in self.claimed, rows))[:limit]:
            self.claimed.add(offset)
            one = message(offset, key, claim=1)
            if self.keys.admit(one) is Admission.GO:
                self.send(one)

    @rule(messages=st.integers(1, 4), body_bytes=st.integers(0, 20))
    def defers(self, messages: int, body_bytes: int) -> None:
        self.keys.defer(messages, body_bytes)

    @rule(messages=st.integers(1, 4), body_bytes=st.integers(0, 20), ahead=st.booleans())
    def asks_for_bodies(self, messages: int, body_bytes: int, ahead: bool) -> None:
        read = self.keys.bodies_to_read(messages, body_bytes, ahead=ahead)
        self.asked = [one.offset for one in read]

    @rule()
    def reads_bodies(self) -> None:
        """What was asked for may have been postponed, sent or stored since."""
        read = [message(offset, self.key_of[offset]) for offset in self.asked]
        self.send(*self.keys.bodies_read(read))
        self.asked = []

    @rule(data=st.data())
    def expires(self, data: st.DataObject) -> None:
        """Messages that wait are taken out, and are dead letters later."""
        waiting = [one for one in self.keys.waiting() if one.claim is None]
        if not waiting:
            return
        offsets = data.draw(st.sets(st.sampled_from([one.offset for one in waiting]), min_size=1))
        next_ones, following = self.keys.remove(offsets)
        self.send(*following)
        gone = [one for one in waiting if one.offset in offsets]
        for one in sorted(gone, key=lambda one: one.offset in next_ones):
            self.removed.add(one.offset)
            if one.offset in next_ones:
                self.send(self.keys.settled(one)[0])
            else:
                self.keys.expired(one)

    @invariant()
    def what_is_sent_has_its_body(self) -> None:
        assert all((one.body, one.headers) == (b"body", "{}") for one in self.in_flight)

    @invariant()
    def what_has_no_body_is_counted(self) -> None:
        without = sum(not one.body for one in self.keys.waiting())
        assert (self.keys.deferred, self.keys.deferred_bytes) == (without, without * len(b"body"))

    @invariant()
    def one_message_of_a_key_is_in_flight(self) -> None:
        keys = [one.key for one in self.in_flight]
        assert len(keys) == len(set(keys))

    @invariant()
    def in_order_and_nothing_lost(self) -> None:
        for offsets in self.sent.values():
            in_time = [offset for offset in offsets if offset not in self.delayed]
            assert in_time == sorted(in_time)
        # A delayed message holds others from its first claim on.
        holding = {offset for offset in self.stored if offset <= self.position} - self.claimed - self.delayed
        assert all(self.keys.has_stored(self.stored[offset]) for offset in holding)

    def teardown(self) -> None:
        """Without failures every message is delivered, in order."""
        self.early.clear()
        while self.position < self.offset:
            self.delivers_and_claims()
            self.read("a")
        for _ in range(10 * self.offset + 10):
            self.delivers_and_claims()
            if not self.in_flight:
                break
        self.in_order_and_nothing_lost()
        done = [offset for offsets in self.done.values() for offset in offsets]
        assert len(set(done)) == len(done)
        assert set(done) | self.removed == set(range(1, self.offset + 1))

    def delivers_and_claims(self) -> None:
        while self.in_flight:
            one = self.in_flight.pop()
            self.done.setdefault(str(one.key), []).append(one.offset)
            self.stored.pop(one.offset, None)
            self.claimed.discard(one.offset)
            self.send(self.keys.settled(one)[0])
        for key in "ab":
            self.claim(key, 3)
        self.asks_for_bodies(2, 0, ahead=False)
        self.reads_bodies()


KeysModel.TestCase.settings = settings(max_examples=examples(500), stateful_step_count=40)
TestKeys = KeysModel.TestCase


def test_past_the_limit_the_window_stops() -> None:
    keys = KeyOrder({"k": [1]})
    for offset in range(2, HELD_MOST + 1):
        assert not keys.full
        assert keys.admit(message(offset, "k")) is Admission.HOLD
    assert keys.full
    first = message(1, "k", claim=1)
    assert keys.admit(first) is Admission.GO
    keys.settled(first)
    assert not keys.full


def test_rows_that_the_log_has_not_reached_hold_nothing_before_them() -> None:
    keys = KeyOrder({"k": [5, 2], "other": [9]}, reached=3)
    assert keys.stored_offsets() == {2, 5, 9}
    keys.removed({2})
    four = message(4, "k")
    assert keys.admit(four) is Admission.GO
    assert not keys.has_stored("k")
    assert keys.admit(message(6, "k")) is Admission.HOLD
    assert keys.settled(four) == (None, [])
    assert keys.admit(message(7, "other")) is Admission.GO
    keys.reach(9)
    assert keys.admit(message(10, "other")) is Admission.HOLD


def test_a_row_that_is_claimed_at_the_end_of_the_log_is_forgotten_after_its_settle() -> None:
    keys = KeyOrder({"k": [5]}, reached=3, hold_dead=True)
    five = message(5, "k", claim=1)
    assert keys.admit(five) is Admission.GO
    keys.freed({"k"}, {"k": [5]})
    keys.settled(five)
    assert keys.stored_offsets() == set()
    assert keys.admit(message(6, "k")) is Admission.GO


def test_the_window_does_not_stop_before_it_reaches_all_rows() -> None:
    keys = KeyOrder({"k": range(1, HELD_MOST + 1), "other": [HELD_MOST + 2]}, reached=HELD_MOST)
    assert not keys.full
    assert keys.admit(message(HELD_MOST + 1, "k")) is Admission.HOLD
    assert not keys.full
    keys.reach(HELD_MOST + 2)
    assert keys.full


def test_dead_letters_that_upkeep_made_of_rows_ahead_stop_their_keys() -> None:
    keys = KeyOrder({"k": [5]}, reached=3, hold_dead=True)
    keys.removed({5})
    assert keys.dead == {"k"}
    assert keys.admit(message(4, "k")) is Admission.HOLD


def test_messages_without_bodies_have_a_limit() -> None:
    keys = KeyOrder({})
    assert keys.admit(message(0, "k")) is Admission.GO
    for offset in range(1, 4):
        keys.admit(message(offset, "k"))
    keys.defer(1, 100)
    assert (keys.deferred, len(keys.waiting())) == (2, 3)
    for offset in range(4, DEFERRED_MOST + 2):
        assert not keys.full
        assert keys.admit(message(offset, "k")) is Admission.WAIT
    assert keys.full


def test_a_key_keeps_bodies_in_bytes() -> None:
    keys, size = KeyOrder({}), len(b"body")
    for offset in range(6):
        keys.admit(message(offset, "k"))
    keys.defer(64, 2 * size)
    assert [bool(one.body) for one in keys.waiting()] == [True, True, False, False, False]
    # What is in memory has used up the bytes already.
    assert keys.bodies_to_read(64, 2 * size, ahead=True) == []
    for offset in (0, 1):
        keys.settled(message(offset, "k"))
    assert keys.settled(message(2, "k")) == (None, [])
    assert [one.offset for one in keys.bodies_to_read(64, 2 * size, ahead=False)] == [3]
    assert [one.offset for one in keys.bodies_to_read(64, 2 * size, ahead=True)] == [3, 4]
    assert [one.offset for one in keys.bodies_read([message(3, "k"), message(4, "k")])] == [3]


def test_one_read_of_bodies_is_limited_and_the_keys_that_wait_longest_come_first() -> None:
    keys, large = KeyOrder({}), WINDOW_BYTES // 2
    for number in range(4):
        keys.admit(message(number, f"k{number}"))
        keys.admit(replace(message(10 + number, f"k{number}"), body=bytes(large)))
    keys.defer(64, 0)
    assert keys.deferred_bytes == 4 * large
    assert keys.bodies_to_read(64, 8 * large, ahead=False) == []
    for number in (3, 0, 2):
        assert keys.settled(message(number, f"k{number}")) == (None, [])
    wanted = keys.bodies_to_read(64, 8 * large, ahead=True)
    assert [one.key for one in wanted] == ["k3", "k0"]
    assert keys.bodies_read([replace(one, body=bytes(large)) for one in wanted])
    assert [one.key for one in keys.bodies_to_read(64, 8 * large, ahead=False)] == ["k2"]


def test_a_dead_letter_stops_its_key_until_it_is_freed() -> None:
    keys = KeyOrder({}, hold_dead=True)
    one, two = message(1, "k"), message(2, "k")
    assert (keys.admit(one), keys.admit(two)) == (Admission.GO, Admission.WAIT)
    assert keys.settled(one, dead=True) == (None, [two])
    assert keys.admit(message(3, "k")) is Admission.HOLD
    assert keys.admit(message(4, None)) is Admission.GO
    keys.freed(["k"], {})
    for offset in (2, 3):
        claimed = message(offset, "k", claim=1)
        assert keys.admit(claimed) is Admission.GO
        keys.settled(claimed)
    assert keys.admit(message(5, "k")) is Admission.GO


def test_a_key_stays_busy_if_a_message_expires_behind_the_one_in_flight() -> None:
    keys = KeyOrder({}, hold_dead=True)
    first, second, third = (message(offset, "k") for offset in (1, 2, 3))
    assert keys.admit(first) is Admission.GO
    assert keys.admit(second) is keys.admit(third) is Admission.WAIT
    keys.remove({2})
    assert keys.expired(second) == [third]
    # A person redelivers the second message while the first one is in flight.
    keys.freed({"k"}, {})
    again = message(2, "k", claim=1)
    assert keys.admit(again) is Admission.WAIT
    assert keys.settled(first) == (again, [])


def test_what_is_new_waits_for_a_redelivered_message_that_is_not_claimed_yet() -> None:
    keys = KeyOrder({}, hold_dead=True)
    first = message(1, "k")
    assert keys.admit(first) is Admission.GO
    keys.settled(first, dead=True)
    keys.freed({"k"}, {"k": [1], "other": [2]})
    assert keys.admit(message(3, "k")) is Admission.HOLD
    assert keys.admit(message(4, "other")) is Admission.GO
    claimed, held = message(1, "k", claim=1), message(3, "k", claim=2)
    assert keys.admit(claimed) is Admission.GO
    keys.settled(claimed)
    assert keys.admit(message(5, "k")) is Admission.HOLD
    assert keys.admit(held) is Admission.GO


def test_rows_that_upkeep_removed_hold_nothing() -> None:
    keys = KeyOrder({"k": [1, 2], "other": [3]})
    keys.removed({1, 2})
    assert keys.stored_offsets() == {3}
    assert keys.admit(message(4, "k")) is Admission.GO
    assert keys.admit(message(5, "other")) is Admission.HOLD


def test_dead_letters_that_upkeep_made_stop_their_key_until_it_is_freed() -> None:
    keys = KeyOrder({"k": [1, 2], "other": [3]}, hold_dead=True)
    keys.removed({1})
    assert keys.dead == {"k"}
    keys.removed({2})
    assert keys.admit(message(4, "k")) is Admission.HOLD
    keys.removed({4})
    keys.freed({"k"}, {})
    assert keys.admit(message(5, "k")) is Admission.GO
