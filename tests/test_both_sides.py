"""What the service and the nightly proof both know, though neither imports the other: see docs/decisions/0026."""

from datetime import date, timedelta

from app import access, announcing, delivery_policy, halves, models, policy
from app.loops import holdings, relay, routing, sweep
from app.store import days
from app.store import relay as log
from app.verdicts import CheckBackState, Verdict
from spark import database, manifest, schemas, watermark
from spark.transforms import joined, routes, transactions


def test_the_names_of_tables_columns_and_partitions() -> None:
    assert set(schemas.BIG) == set(models.DAY_TABLES) == set(manifest.TABLES)
    for name, frame in schemas.FRAMES.items():
        assert set(frame.names) <= set(models.metadata.tables[name].columns.keys()), name
    day = date(2026, 11, 21)
    for table in schemas.BIG:
        named = {named(table, day) for named in (days.partition_name, database.partition_name, manifest.partition)}
        assert named == {f"{table}_20261121"}


def test_the_codes() -> None:
    assert (joined.COMMIT, joined.ROLLBACK) == (Verdict.COMMIT, Verdict.ROLLBACK)
    assert (joined.IN_DOUBT, joined.PARKED) == (CheckBackState.IN_DOUBT, CheckBackState.PARKED)


def test_the_prefix_of_halfnotes_own_topics() -> None:
    sides = {access.RESERVED, announcing.RESERVED, halves.RESERVED, log.RESERVED}
    assert sides == {routes.RESERVED}


def test_a_half_is_swept_before_it_is_called_stuck() -> None:
    """The hourly pass may have just passed it by, and takes as long again at most."""
    assert transactions.LONGEST_SWEEP_S == 2 * sweep.HOURLY_EVERY_S


def test_a_change_has_reached_every_worker_before_deliveries_are_judged_by_it() -> None:
    """Who holds a stream learns of it within a second; one that does not has lost it after its lease."""
    longest = max(relay.KEEP_EVERY, holdings.RENEW_EVERY, timedelta(seconds=routing.EVERY_S)) + holdings.LEASE
    assert 2 * longest <= timedelta(seconds=routes.CHANGE_SETTLES_S)


def test_a_day_is_final_only_when_nothing_can_be_put_off_any_longer() -> None:
    assert watermark.LONGEST_WAIT == delivery_policy.POSTPONED_AT_MOST
    assert timedelta(seconds=policy.AskingPolicy().unanswered_park_s) == watermark.LONGEST_WAIT
