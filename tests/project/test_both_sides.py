"""Constants that the service and the nightly proof share without importing each other: see docs/decisions/0026."""

from datetime import date, timedelta

from app import models, topic_patterns
from app.checkback import sweep
from app.coordinator import wire
from app.policy import check_schedule, delivery_retry
from app.relay import assignments, unrouted
from app.relay import loop as relay_loop
from app.schemas import producer_groups
from app.store.retention import days
from app.verdicts import CheckBackState, Verdict
from spark import day_selection, frames, manifest, schemas
from spark.postgres import connections
from spark.transforms import joined, routes, transactions


def test_the_names_of_tables_columns_and_partitions() -> None:
    assert set(schemas.BIG) == set(models.DAY_TABLES) == set(manifest.TABLES)
    for name, frame in schemas.FRAMES.items():
        assert set(frame.names) <= set(models.metadata.tables[name].columns.keys()), name
    day = date(2026, 11, 21)
    for table in schemas.BIG:
        named = {named(table, day) for named in (days.partition_name, connections.partition_name, manifest.partition)}
        assert named == {f"{table}_20261121"}


def test_the_codes() -> None:
    assert (joined.COMMIT, joined.ROLLBACK) == (Verdict.COMMIT, Verdict.ROLLBACK)
    assert (joined.IN_DOUBT, joined.PARKED) == (CheckBackState.IN_DOUBT, CheckBackState.PARKED)


def test_the_prefix_of_halfnotes_own_topics() -> None:
    assert topic_patterns.RESERVED == routes.RESERVED


def test_a_half_is_swept_before_it_is_called_stuck() -> None:
    """The hourly pass may have just passed it by, and takes as long again at most."""
    assert transactions.LONGEST_SWEEP_S == 2 * sweep.HOURLY_EVERY_S


def test_no_policy_waits_longer_than_the_proof_takes_for_the_longest() -> None:
    fields = producer_groups.GroupPut.model_fields
    allowed = [fields[name].metadata for name in ("interval_s", "immunity_s")]
    assert {bound.le for one in allowed for bound in one if hasattr(bound, "le")} == {transactions.LONGEST_POLICY_S}
    assert transactions.LONGEST_POLICY_S == wire.POLICY_MAX_S
    assert max(check_schedule.LONGEST_BACKOFF_S, check_schedule.LONGEST_HOLD_S) <= transactions.LONGEST_POLICY_S


def test_a_change_has_reached_every_worker_before_deliveries_are_judged_by_it() -> None:
    """A worker learns within a second that it holds a stream; otherwise it loses the stream when its lease ends."""
    longest = (
        max(relay_loop.REFRESH_EVERY, assignments.RENEW_EVERY, timedelta(seconds=unrouted.EVERY_S)) + assignments.LEASE
    )
    assert 2 * longest <= timedelta(seconds=frames.CHANGE_SETTLES_S)


def test_a_day_is_final_only_when_nothing_can_be_put_off_any_longer() -> None:
    assert day_selection.LONGEST_WAIT == delivery_retry.POSTPONED_AT_MOST
    assert timedelta(seconds=check_schedule.AskingPolicy().unanswered_park_s) == day_selection.LONGEST_WAIT
