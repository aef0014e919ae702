"""Which message of a key is sent when, for any order of outcomes: a model against lists."""

from datetime import UTC, datetime
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.relay.key_order import HELD_MOST, Admission, KeyOrder
from app.store.relay.log import Outgoing
from tests.support.examples import examples

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


def message(offset: int, key: str | None, claim: int | None = None) -> Outgoing:
    return Outgoing(
        offset, UUID(int=offset), 0, "order", key, None, None, AT, "shop", None, "text/plain", b"", claim=claim
    )


class KeysModel(RuleBasedStateMachine):
    """A stream: messages are read, sent, settled, postponed, stored, claimed and sent again."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = KeyOrder({})
        self.offset = 0
        self.in_flight: list[Outgoing] = []
        # The rows of delivery_retry (offset → key), and which of them are claimed.
        self.stored: dict[int, str] = {}
        self.claimed: set[int] = set()
        self.done: dict[str, list[int]] = {}
        self.removed: set[int] = set()

    @rule(key=st.sampled_from("ab"))
    def read(self, key: str) -> None:
        self.offset += 1
        one = message(self.offset, key)
        match self.keys.admit(one):
            case Admission.GO:
                self.in_flight.append(one)
            case Admission.HOLD:
                self.stored[one.offset] = key

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def succeeds(self, data: st.DataObject) -> None:
        one = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.done.setdefault(str(one.key), []).append(one.offset)
        self.stored.pop(one.offset, None)
        self.claimed.discard(one.offset)
        following, back = self.keys.settled(one)
        assert not back
        if following is not None:
            self.in_flight.append(following)

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
        """Claim as the statement does: the lowest offsets of a key, if none of the key is claimed."""
        rows = sorted(offset for offset, stored_key in self.stored.items() if stored_key == key)
        if rows and not self.claimed.intersection(rows):
            for offset in rows[:limit]:
                self.claimed.add(offset)
                one = message(offset, key, claim=1)
                if self.keys.admit(one) is Admission.GO:
                    self.in_flight.append(one)

    @invariant()
    def one_message_of_a_key_is_in_flight(self) -> None:
        keys = [one.key for one in self.in_flight]
        assert len(keys) == len(set(keys))

    @invariant()
    def in_order_and_nothing_lost(self) -> None:
        for offsets in self.done.values():
            assert offsets == sorted(offsets)
        assert set(self.stored) - self.claimed == {
            offset for offset in self.stored if offset not in self.claimed and self.keys.has_stored(self.stored[offset])
        }

    def teardown(self) -> None:
        """Without failures every message is delivered, in order."""
        for _ in range(10 * self.offset + 10):
            while self.in_flight:
                one = self.in_flight.pop()
                self.done.setdefault(str(one.key), []).append(one.offset)
                self.stored.pop(one.offset, None)
                self.claimed.discard(one.offset)
                following, _ = self.keys.settled(one)
                if following is not None:
                    self.in_flight.append(following)
            for key in "ab":
                self.claim(key, 3)
            if not self.in_flight:
                break
        done = [offset for offsets in self.done.values() for offset in offsets]
        assert len(set(done)) == len(done)
        assert set(done) | self.removed == set(range(1, self.offset + 1))


KeysModel.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40)
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
