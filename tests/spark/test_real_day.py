"""A day that the real service made has no finding; each fault planted in it by plain SQL is one, and the only one."""

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark import schemas
from spark.engine.progress import Progress
from spark.frames import Frames
from spark.jobs import archive
from spark.postgres.connections import connect
from spark.proof.read_days import Wish, read_days
from spark.transforms import rules
from spark.transforms.figures import figures_and_volumes, figures_of_counts
from spark.transforms.joined import Joined
from spark.transforms.rules import RULES, findings, findings_of, found_in, joined
from tests.conftest import migrated_template
from tests.spark.conftest import frame
from tests.spark.days import prove, rows
from tests.spark.real import VICTIMS, make_day
from tests.support import postgres

# Everything was due at once.
SLA_S = 0.0
Victims = dict[str, dict[str, Any]]

# The rows that faults may change: committed messages in the order of the log, and transactions rolled back.
SENT = """
select o.transaction_id::text as id, o."offset" from outbox o where o.topic = 'victim' order by o."offset"
"""
ROLLED_BACK = """
select h.transaction_id::text as id from half h join op using (transaction_id)
where h.topic = 'victim' and op.verdict = 2 order by 1
"""

# What waits for a retry after that: a delayed message that is due too early, and one that was never tried.
RETRIES = """
select case when extract(year from due_at) = 2099 then 'retry_never_due' else 'retry_overdue' end as kind,
  transaction_id || '-' || position || ':' || subscription_id as id from delivery_retry
"""

# A receipt as the relay writes it.
RECEIVED = """
insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms,
  status, digest, settled_at)
select h.transaction_id, h.position, {subscription}, coalesce(o."offset", 1), 'delivered', 1, now(), 5, 200,
  h.body_digest, now()
from half h left join outbox o using (transaction_id, position) where h.transaction_id = %(id)s
"""

# One statement for each kind; the victim is %(id)s, and nothing else is touched. Those of the second dictionary take a
# transaction that was rolled back.
ON_SENT = {
    "committed_not_published": "with gone as (delete from receipt where transaction_id = %(id)s) "
    "delete from outbox where transaction_id = %(id)s",
    "published_without_commit": "with gone as (delete from half where transaction_id = %(id)s) "
    "delete from op where transaction_id = %(id)s",
    "published_after_rollback": "update op set verdict = 2 where transaction_id = %(id)s",
    "offset_of_two_messages": 'update outbox o set "offset" = b."offset", committed_at = b.committed_at '
    'from outbox b where o.transaction_id = %(id)s and b."offset" = %(offset)s - 1',
    "message_with_two_offsets": 'insert into outbox (transaction_id, position, "offset", topic, committed_at) '
    'select transaction_id, position, (select max("offset") + 1 from outbox), topic, clock_timestamp() from outbox '
    "where transaction_id = %(id)s",
    "offsets_contradict_time": "update outbox set committed_at = committed_at - interval '1 hour' "
    "where transaction_id = %(id)s",
    "unrouted": "with gone as (delete from receipt where transaction_id = %(id)s) "
    "update outbox set topic = 'victm' where transaction_id = %(id)s",
    "undelivered": "delete from receipt where transaction_id = %(id)s",
    "receipt_not_matched": RECEIVED.format(subscription="(select min(subscription_id) from subscription)"),
    "half_altered": "update half set content_type = 'text/plain' where transaction_id = %(id)s",
    "published_differs": "update outbox set due_at = committed_at where transaction_id = %(id)s",
    "times_disagree": "update op set decided_at = decided_at - interval '1 minute' where transaction_id = %(id)s",
    "verdict_unproven": "update op set source = 1 where transaction_id = %(id)s",
    "receipt_wrong": "update receipt set status = 500 where transaction_id = %(id)s",
    # Every third message has the same key.
    "order_broken": "update receipt r set first_at = b.first_at, settled_at = b.settled_at from receipt b "
    'where r.transaction_id = %(id)s and b."offset" = %(offset)s - 3 and b.subscription_id = r.subscription_id',
    "delivery_wrong": 'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, '
    'attempts, first_at, reason, died_at) select r.subscription_id, transaction_id, position, o."offset", o.topic, '
    "o.key, 1, r.first_at, 'day_left', r.settled_at from outbox o join receipt r using (transaction_id, position) "
    "where transaction_id = %(id)s",
    "content_differs": "update receipt set digest = sha256('x') where transaction_id = %(id)s",
    "verdict_refused": "insert into attempt (transaction_id, kind, at, outcome, verdict, source) "
    "values (%(id)s, 'refused', now(), 'refused', 2, 0)",
}
ON_ROLLED_BACK = {
    "op_without_half": "delete from half where transaction_id = %(id)s",
    "half_stuck": "delete from op where transaction_id = %(id)s",
    "receipt_without_message": RECEIVED.format(
        subscription="(select subscription_id from subscription where name = 'takers')"
    ),
    "parked": "with gone as (delete from op where transaction_id = %(id)s) insert into check_back (transaction_id, "
    "producer_group, state, swept_at, parked_at) values (%(id)s, 'shop', 2, now(), now())",
    "checks_beyond_max": "insert into attempt (transaction_id, kind, at, number, outcome, source) "
    "select %(id)s::uuid, 'check', now(), n, 'unknown', 1 from generate_series(1, 3) n",
}
# Of a subscription each, by its name.
OF_SUBSCRIPTIONS = {
    "delivery_late": (
        "flaky",
        "with gone as (delete from receipt r using subscription s where s.name = 'flaky' "
        'and r.subscription_id = s.subscription_id) update checkpoint c set "offset" = 0 from subscription s '
        "where s.name = 'flaky' and c.subscription_id = s.subscription_id",
    ),
    "retry_overdue": ("ordered", "update delivery_retry set due_at = now() - interval '1 minute'"),
    "retry_never_due": (
        "paused",
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, attempts, first_at, '
        "due_at) select s.subscription_id, o.transaction_id, o.position, o.\"offset\", o.topic, 1, now(), '2099-01-01' "
        "from subscription s, (select * from outbox where topic = 'order' order by \"offset\" limit 1) o "
        "where s.name = 'paused'",
    ),
    "subscription_differs": (
        "late",
        "update subscription_version v set max_in_flight = v.max_in_flight + 1 from subscription s "
        "where s.name = 'late' and v.subscription_id = s.subscription_id",
    ),
    "replay_incomplete": (
        "mailer:1",
        'delete from receipt where replay = 1 and "offset" = (select min("offset") from receipt where replay = 1)',
    ),
    "checkpoint_differs": (
        "dying",
        "delete from checkpoint c using subscription s "
        "where s.name = 'dying' and c.subscription_id = s.subscription_id",
    ),
}
# Of another table each, by the finding's subject: of the reissue's row of the audit, whose time no other rule uses.
OF_OTHERS = {
    "audit_broken": (
        "13",
        "update audit set at = at + interval '1 us' where audit_id = 13 and what = 'transaction.reissue'",
    )
}
# After the day was archived; of rows, and of a column, that no other rule judges.
AFTER_ARCHIVE = "update op set reason = 'changed by hand' where transaction_id = %(id)s"
# The day has no certificate, there are no days before it, and there is one installation; the ledgers have no statuses.
WITHOUT_FAULT = {"certificate_differs", "fewer_than_usual", "in_two_installations", "answer_differs"}
IN_LEDGERS = ("ledger_disagrees", "never_consumed", "consumed_twice")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a database with the day."""
    url = postgres.create_database(migrated_template())
    asyncio.run(make_day(url, tmp_path_factory.mktemp("workers")))
    yield url
    postgres.drop_database(url)


def day_of(url: str) -> date:
    """The day that was made."""
    day: date = rows(url, "select min(born_at)::date as day from half")[0]["day"]
    return day


def read(spark: SparkSession, url: str, path: Path) -> Frames:
    """Return the frames of the day, with its archive beside them, as a run reads them."""
    wish = Wish([day_of(url)], {}, 3600)
    [day] = read_days(spark, url, wish, str(path / "staged"), Progress(stream=io.StringIO())).days
    return day.frames


def archived(url: str, root: Path, *options: str) -> None:
    """Archive the day."""
    assert archive.main(["--database-url", url, "--archive", str(root), "--day", str(day_of(url)), *options]) == 0


def with_ledgers(spark: SparkSession, f: Frames, *, victims: Victims | None = None) -> Frames:
    """Return the frames with the ledgers that fit them; or with faults in those."""
    said = f.op.selectExpr("transaction_id", "case verdict when 1 then 'commit' else 'rollback' end as verdict")
    received = f.receipt.where("outcome = 'delivered'").join(f.outbox, ["transaction_id", "position"], "left_semi")
    seen = received.selectExpr("concat_ws('-', transaction_id, position) as message_id")
    producers = {row.transaction_id: row.verdict for row in said.collect()}
    consumers = {row.message_id: 1 for row in seen.distinct().collect()}
    if victims is not None:
        _spoil_ledgers(victims, producers, consumers)
    of_producers = [{"transaction_id": one, "verdict": verdict} for one, verdict in producers.items()]
    of_consumers = [{"message_id": one, "times_seen": times} for one, times in consumers.items()]
    return replace(
        f,
        producer_ledger=frame(spark, schemas.PRODUCER_LEDGER, of_producers),
        consumer_ledger=frame(spark, schemas.CONSUMER_LEDGER, of_consumers),
    )


def _spoil_ledgers(victims: Victims, producers: dict[str, str], consumers: dict[str, int]) -> None:
    messages = {kind: f"{victims[kind]['id']}-0" for kind in IN_LEDGERS}
    producers[victims["ledger_disagrees"]["id"]] = "rollback"
    producers[victims["ledger_not_sent"]["id"]] = "commit"
    del consumers[messages["never_consumed"]]
    consumers[messages["consumed_twice"]] = 2
    consumers[f"{victims['consumed_not_sent']['id']}-0"] = 1


def victims_of(connection: Any) -> Victims:
    """Return the rows to damage, by kind: every second message, because a fault may need the one before it."""
    sent, back = connection.execute(SENT).fetchall(), connection.execute(ROLLED_BACK).fetchall()
    assert len(sent) >= len(back) == VICTIMS
    victims = dict(zip((*ON_SENT, *IN_LEDGERS), sent[1::2], strict=False))
    victims |= dict(zip(ON_ROLLED_BACK, back, strict=False))
    # Of the day, and of no transaction.
    for number, kind in enumerate(("ledger_not_sent", "consumed_not_sent")):
        victims[kind] = {"id": f"{sent[0]['id'][:15]}fff-8000-{number:012}"}
    without = {"archive_differs", *WITHOUT_FAULT, *OF_SUBSCRIPTIONS, *OF_OTHERS}
    assert victims.keys() == {rule.kind for rule in RULES} - without
    return victims


def plant(url: str) -> Victims:
    """Plant a fault of each kind that tables can have, but for that of the archive; return whose it is, by kind."""
    with connect(url) as connection:
        victims = victims_of(connection)
        connection.execute("alter table outbox drop constraint outbox_pkey")
        for kind, statement in (ON_SENT | ON_ROLLED_BACK).items():
            assert connection.execute(statement, victims[kind]).rowcount >= 1, kind
        for name, statement in (OF_SUBSCRIPTIONS | OF_OTHERS).values():
            assert connection.execute(statement).rowcount == 1, name
        retries = connection.execute(RETRIES).fetchall()
    return victims | {row["kind"]: row for row in retries}


def subjects(victims: Victims, subscriptions: dict[str, int]) -> dict[str, list[str]]:
    """Return the subjects of each kind's findings, in order."""
    found = {kind: victim["id"] for kind, victim in victims.items()}
    of_messages = ("published_without_commit", "published_after_rollback", "message_with_two_offsets")
    of_messages += ("times_disagree", "content_differs", "never_consumed", "consumed_twice", "consumed_not_sent")
    found |= {kind: f"{found[kind]}-0" for kind in of_messages}
    takers = {
        "undelivered": "takers",
        "delivery_wrong": "takers",
        "receipt_wrong": "takers",
        "order_broken": "takers",
        "receipt_without_message": "takers",
        "receipt_not_matched": "mailer",
    }
    found |= {kind: f"{found[kind]}-0:{subscriptions[name]}" for kind, name in takers.items()}
    offsets = {kind: victims[kind]["offset"] for kind in ("offset_of_two_messages", "offsets_contradict_time")}
    found["offset_of_two_messages"] = str(offsets["offset_of_two_messages"] - 1)
    found["offsets_contradict_time"] = str(offsets["offsets_contradict_time"])
    found |= {kind: name for kind, (name, _) in (OF_SUBSCRIPTIONS | OF_OTHERS).items()}
    found |= {"unrouted": "victm", "verdict_refused": "shop", "archive_differs": "op"}
    wanted = {kind: [subject] for kind, subject in found.items()}
    retries = [victims[kind]["id"] for kind in ("retry_overdue", "retry_never_due")]
    wanted["delivery_wrong"] = sorted([*wanted["delivery_wrong"], *retries])
    # Their rows in the outbox have another topic than their halves, or no key.
    differing = ("published_differs", "unrouted", "message_with_two_offsets")
    wanted["published_differs"] = sorted(f"{victims[kind]['id']}-0" for kind in differing)
    # Its receipt has the offset that the message had.
    moved = f"{victims['offset_of_two_messages']['id']}-0:{subscriptions['takers']}"
    wanted["receipt_wrong"] = sorted([*wanted["receipt_wrong"], moved])
    return wanted


def test_the_day_as_the_service_made_it_has_no_finding(spark: SparkSession, made: str, tmp_path: Path) -> None:
    archived(made, tmp_path / "archive")
    f = with_ledgers(spark, read(spark, made, tmp_path))
    assert f.archive is not None
    assert f.archive.count() == f.rows["half"]
    # The day has what there is to judge.
    assert min(f.rows[name] for name in schemas.FRAMES if name != "check_back") > 0, f.rows
    found = findings(f, sla_s=SLA_S)
    assert [(row.kind, row.subject, row.detail) for row in found.collect()] == []


# The claimed checks of the day that decided, by their transactions.
CLAIMED = """
select a.transaction_id::text as id, a.verdict from attempt a join half h using (transaction_id)
where h.producer_group = 'batch' and h.position = 0 and a.kind = 'check' and a.outcome in ('commit', 'rollback')
order by 1
"""
# Of one transaction each: its answer is gone, is another one, was a lapse; the lapse of a claim became a verdict.
ALTERED = (
    "delete from attempt where transaction_id = %(id)s and kind = 'check' and verdict is not null",
    "update attempt set outcome = 'rollback', verdict = 2 where transaction_id = %(id)s and verdict = 1",
    "update attempt set outcome = 'unanswered', verdict = null where transaction_id = %(id)s and verdict is not null",
    "update op set source = 2 where transaction_id = %(id)s",
)


def test_an_altered_answer_to_a_claimed_check_is_found(spark: SparkSession, made: str, tmp_path: Path) -> None:
    url = postgres.create_database(made.rpartition("/")[2])
    try:
        with connect(url) as connection:
            answered = connection.execute(CLAIMED).fetchall()
            assert sorted(row["verdict"] for row in answered) == [1, 1, 1, 2]
            committed = [row for row in answered if row["verdict"] == 1]
            victims = [*committed, *(row for row in answered if row["verdict"] == 2)]
            for victim, statement in zip(victims, ALTERED, strict=True):
                assert connection.execute(statement, {"id": victim["id"]}).rowcount >= 1, statement
        found = findings(read(spark, url, tmp_path), sla_s=SLA_S).collect()
    finally:
        postgres.drop_database(url)
    wanted = sorted(("verdict_unproven", row["id"]) for row in victims)
    # If the day was archived before, its archive differs as well.
    assert sorted((row.kind, row.subject) for row in found if row.kind != "archive_differs") == wanted


@pytest.mark.slow
def test_a_search_in_files_finds_nothing_in_it(
    spark: SparkSession, made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "SMALL_DAY", 0)
    j = joined(with_ledgers(spark, read(spark, made, tmp_path)), SLA_S, tmp_path)
    assert j.counts is not None
    assert findings_of(j).collect() == []
    assert figures_of_counts(j.whole, j.counts) == figures_and_volumes(j.whole)


@pytest.fixture(scope="module")
def damaged(
    spark: SparkSession, made: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Joined, dict[str, list[str]]]:
    """What the rules read of the day with a fault of each kind, and the subjects of these by kind."""
    url = postgres.create_database(made.rpartition("/")[2])
    try:
        victims, path = plant(url), tmp_path_factory.mktemp("damaged")
        archived(url, path / "archive")
        with connect(url) as connection:
            assert connection.execute(AFTER_ARCHIVE, victims["verdict_refused"]).rowcount == 1
        f = with_ledgers(spark, read(spark, url, path), victims=victims)
    finally:
        postgres.drop_database(url)
    subscriptions = {row.name: row.subscription_id for row in f.subscription.collect()}
    return joined(f, SLA_S), subjects(victims, subscriptions)


def test_each_planted_fault_is_one_finding(damaged: tuple[Joined, dict[str, list[str]]]) -> None:
    j, wanted = damaged
    pairs = [(kind, subject) for kind, subjects in wanted.items() for subject in subjects]
    assert sorted((row.kind, row.subject) for row in found_in(j).collect()) == sorted(pairs)


@pytest.mark.slow
def test_each_is_found_after_a_search_in_files(
    spark: SparkSession,
    damaged: tuple[Joined, dict[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "SMALL_DAY", 0)
    j, wanted = damaged
    searched = joined(j.whole, SLA_S, tmp_path)
    assert searched.counts is not None
    assert 0 < searched.suspects < sum(searched.counts.outcomes.values())
    pairs = [(kind, subject) for kind, subjects in wanted.items() for subject in subjects]
    assert sorted((row.kind, row.subject) for row in findings_of(searched).collect()) == sorted(pairs)


@pytest.mark.parametrize("kind", [rule.kind for rule in RULES if rule.kind not in WITHOUT_FAULT])
def test_each_is_found_by_its_own_rule_alone(damaged: tuple[Joined, dict[str, list[str]]], kind: str) -> None:
    # So whichever is switched off, exactly its own fault goes unfound.
    j, wanted = damaged
    others = frozenset(rule.kind for rule in RULES) - {kind}
    pairs = [(kind, subject) for subject in wanted[kind]]
    assert sorted((row.kind, row.subject) for row in found_in(j, others).collect()) == pairs


def test_an_archived_day_is_proved_and_one_that_was_changed_since_is_not(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], spark: SparkSession
) -> None:
    """By whole runs: the first takes the day up because it was archived."""
    url = postgres.create_database(made.rpartition("/")[2])
    try:
        day = day_of(url)
        assert prove(url, "--day", day) == 0
        archived(url, tmp_path)
        # Yesterday can be no final day; it has been proved, and nothing of it changes.
        with connect(url) as connection:
            connection.execute("update reconciliation_day set state = 'final'")
        capsys.readouterr()
        assert prove(url) == 0
        assert f'"{day}: archived"' in capsys.readouterr().err
        with connect(url) as connection:
            changed = AFTER_ARCHIVE.replace("%(id)s", "(select transaction_id from op order by 1 limit 1)")
            assert connection.execute(changed).rowcount == 1
        assert prove(url, "--day", day) == 3
        [found] = rows(url, "select kind, subject, detail from finding where resolved_at is null")
    finally:
        postgres.drop_database(url)
    assert (found["kind"], found["subject"]) == ("archive_differs", "op")
    held, tables = found["detail"]["archived"], found["detail"]["found"]
    assert held["digest"] != tables["digest"]
    assert {**held, "digest": ""} == {**tables, "digest": ""}
