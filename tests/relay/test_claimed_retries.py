"""Which claimed messages are new to a stream, and which it has already."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from app.relay.claimed_retries import ClaimedRetries
from app.relay.settle_buffer import SettleBuffer
from app.store.relay.leases import Lease
from app.store.relay.log import Outgoing
from app.store.relay.results import DELIVERED, NOTE, RETRY, Settlement
from app.store.relay.retries import Claimant, is_full
from tests.relay.test_key_order import message

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
FOR = timedelta(minutes=15)


def take(claimed: ClaimedRetries, one: Outgoing, at: datetime) -> list[Outgoing]:
    return claimed.take([one], at + FOR, at)


def test_a_message_whose_claim_ran_out_goes_on_with_the_next_one() -> None:
    claimed, one = ClaimedRetries(), message(1, "k", claim=1)
    assert take(claimed, one, NOW) == [one]
    claimed.settled([Settlement(one, NOTE, 0, NOW)])
    for claim in (2, 3):
        assert not take(claimed, message(1, "k", claim=claim), NOW + FOR * (claim - 1))
        assert one.claim == claim
    claimed.settled([Settlement(one, RETRY, 1, NOW)])
    again = message(1, "k", claim=4)
    assert take(claimed, again, NOW + FOR * 3) == [again]
    assert one.claim == 3


def test_the_messages_of_a_key_count_as_one() -> None:
    claimed = ClaimedRetries()
    messages = [message(1, "k", claim=1), message(2, "k", claim=1), message(3, "l", claim=1)]
    messages += [message(4, None, claim=1), message(5, None, claim=1)]
    claimed.take(messages, NOW + FOR, NOW)
    assert claimed.keys == 4
    claimed.settled([Settlement(one, RETRY, 1, NOW) for one in messages[2:4]])
    assert claimed.keys == 2


@pytest.mark.parametrize(("ordered", "full"), [(True, False), (False, True)], ids=["ordered", "unordered"])
def test_a_claim_in_the_order_of_keys_is_full_by_its_keys(ordered: bool, full: bool) -> None:
    claimant = Claimant(Lease("relay:1:1:0", uuid4(), 1), 1, 0, 1, 0, room=3, ordered=ordered, hold=False)
    run = [message(offset, "k", claim=1) for offset in range(1, 6)]
    assert is_full(claimant, run) is full
    assert is_full(claimant, [*run, message(6, None, claim=1), message(7, None, claim=1)])


def test_an_outcome_asks_for_a_turn_after_one_was_asked_for_without_outcomes() -> None:
    """As for the next message of a key that is stored: the claim of that turn records nothing."""
    turns: list[None] = []
    buffer = SettleBuffer(lambda: turns.append(None))
    buffer.request_turn()
    buffer.add(Settlement(message(1, "k", claim=1), DELIVERED, 1, NOW), 0)
    assert (len(turns), buffer.due) == (2, True)


def test_a_message_that_a_settle_gave_back_is_new_even_if_the_answer_was_lost() -> None:
    claimed, one, again = ClaimedRetries(), message(1, "k", claim=1), message(1, "k", claim=2)
    assert take(claimed, one, NOW) == [one]
    assert take(claimed, again, NOW + FOR / 2) == [again]
    # It is known only now that the first one is recorded.
    claimed.settled([Settlement(one, RETRY, 1, NOW)])
    assert not take(claimed, message(1, "k", claim=3), NOW + FOR * 2)
    assert (one.claim, again.claim) == (1, 3)
