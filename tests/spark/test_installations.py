"""One proof over several installations: real databases with planted faults, one that fails, and ids in two of them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from spark.certificate.document import Certificate
from spark.certificate.signing import new_key
from spark.installations import Installation, NamesError, installations
from spark.jobs.certificate import main as certificate
from spark.jobs.reconcile import main
from spark.options.reconcile import parsed
from spark.postgres.connections import partition_name
from tests.conftest import migrated_template, postgres
from tests.spark.days import days_ago, fill_day, flip_ops, rows, start_proof

DAY = days_ago(1)
EU, US = "postgresql://h@a/eu", "postgresql://h@a/us?sslmode=require"
OPEN = "select kind, subject, detail from finding where resolved_at is null order by 1, 2"


@pytest.fixture
def other() -> Iterator[str]:
    """A second installation's database."""
    url = postgres.create_database(migrated_template())
    yield url
    postgres.drop_database(url)


@pytest.fixture
def both(dsn: str, other: str) -> list[str]:
    """Options of a run over both: each has 30 transactions of its own yesterday."""
    fill_day(dsn, DAY, 30)
    fill_day(other, DAY, 30, first=1001)
    return ["--database-url", f"eu={dsn}", "--database-url", f"us={other}", "--day", str(DAY)]


def found(dsn: str) -> set[tuple[str, str]]:
    return {(row["kind"], row["subject"]) for row in rows(dsn, OPEN)}


def test_names_are_given_or_those_of_the_databases() -> None:
    assert installations([EU]) == [Installation("", EU)]
    assert [one.name for one in installations([EU, US])] == ["eu", "us"]
    assert installations([f"europe={EU}"], [f"europe={US}"]) == [Installation("europe", EU, US)]
    two = installations([f"a={US}", EU], ["a=postgresql://standby/us"], [("eu", "http://eu")])
    assert two == [Installation("a", US, "postgresql://standby/us"), Installation("eu", EU, None, "http://eu")]


@pytest.mark.parametrize(
    ("urls", "standbys", "said"),
    [
        ([EU, EU], [], "two databases have the name eu"),
        ([f"us={EU}", US], [], "two databases have the name us"),
        ([EU, f"set-aside={US}"], [], "set-aside is a name of --out itself"),
        ([EU, "file:/run/url"], [], "needs a name"),
        ([EU, "postgresql://host"], [], "needs a name"),
        ([EU, US], ["asia=postgresql://s/x"], "--read-url needs one NAME=URL for each of eu, us"),
    ],
)
def test_wrong_names_are_wrong_usage(
    urls: list[str], standbys: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NamesError, match=said):
        installations(urls, standbys)
    given = [word for url in urls for word in ("--database-url", url)]
    given += [word for url in standbys for word in ("--read-url", url)]
    with pytest.raises(SystemExit) as ended:
        parsed(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_environment_names_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", "postgresql://a/one")
    monkeypatch.setenv("HALFNOTE_BASE_URL", "http://one")
    assert parsed([]).installations == [Installation("", "postgresql://a/one", None, "http://one")]
    monkeypatch.setenv("HALFNOTE_DATABASE_URLS", f"eu={EU}\n  {US}\n")
    assert [one.name for one in parsed([]).installations] == ["eu", "us"]
    # An option is stronger, and the default of one service is not that of several.
    assert [one.database_url for one in parsed(["--database-url", EU]).installations] == [EU]
    assert [one.base_url for one in parsed([]).installations] == [None, None]


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_faults_of_both_are_in_one_report_and_each_in_its_own_database(
    dsn: str, other: str, both: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bases = ["--base-url", "eu=http://eu.example", "--base-url", "us=http://us.example/"]
    out = ["--out", str(tmp_path)]
    assert main([*both, *out, *bases]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "eu: proved; resolved: 0; days: 1",
        "us: proved; resolved: 0; days: 1",
        f"report: {(tmp_path / 'report.html').as_uri()}",
        "proved: 2 installations",
    ]

    [flipped] = flip_ops(dsn)
    with psycopg.connect(other) as db:
        [(lost,)] = db.execute('delete from receipt where "offset" = 1010 returning transaction_id').fetchall()
    assert main([*both, *out, *bases]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "findings in eu, us"
    assert found(dsn) == {("published_after_rollback", f"{flipped}-0")}
    [undelivered] = found(other)
    assert undelivered[0] == "undelivered"
    html = (tmp_path / "report.html").read_text()
    for said in (
        "2 findings",
        f'<a href="http://eu.example/transactions/{flipped}">',
        f'<a href="http://us.example/transactions/{lost}">',
        '<span class="narrow">installation </span>eu',
        '<span class="narrow">installation </span>us',
        '<a href="us/report.html">us</a>',
    ):
        assert said in html, said
    for name in ("eu", "us"):
        assert (tmp_path / name / "report.html").exists()
        assert list((tmp_path / name / f"findings/day={DAY}").glob("*.parquet"))


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_each_has_a_chain_of_certificates_with_its_name(
    dsn: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = days_ago(5)
    for url, first in ((dsn, 1), (other, 1001)):
        fill_day(url, day, 10, first=first)
    (tmp_path / "key.pub").write_text(new_key(tmp_path / "key.pem"))
    given = ["--database-url", f"eu={dsn}", "--database-url", f"us={other}", "--day", str(day)]
    assert main([*given, "--out", str(tmp_path / "out"), "--certificate-key", str(tmp_path / "key.pem")]) == 0
    for name, url in (("eu", dsn), ("us", other)):
        file = tmp_path / "out" / name / f"certificates/{day}.json"
        [stored] = rows(url, "select sequence, document from day_certificate")
        assert (stored["sequence"], stored["document"]) == (1, file.read_text())
        assert Certificate.parsed(file.read_text()).body["installation"] == name
        capsys.readouterr()
        assert certificate(["verify", str(file), "--public-key", str(tmp_path / "key.pub")]) == 0
        assert f"The certificate 1 of {day} in {name} is intact" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_an_id_in_both_is_a_finding_of_both(dsn: str, other: str, both: list[str]) -> None:
    # The transactions 21 to 25 of the first, in the second: a copy.
    fill_day(other, DAY, 5, first=21)
    assert main(both) == 3
    here, there = rows(dsn, OPEN), rows(other, OPEN)
    assert here == there
    assert [row["kind"] for row in here] == ["in_two_installations"] * 5
    assert here[0]["detail"] == {"installations": ["eu", "us"]}

    # Only with all installations it is known that the copy is gone.
    with psycopg.connect(other) as db:
        for table in ("receipt", "outbox", "op", "half"):
            db.execute(f"delete from {table} where transaction_id = any(%s)", [[row["subject"] for row in here]])
    missing = ["--database-url", "us=postgresql://halfnote@127.0.0.1:9/none"]
    assert main([*both[:2], *missing, *both[4:]]) == 1
    assert len(found(dsn)) == 5
    assert main(both) == 0
    assert found(dsn) == found(other) == set()


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_failure_of_one_does_not_hide_the_results_of_the_other(
    dsn: str, other: str, both: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [flipped] = flip_ops(other)
    with psycopg.connect(dsn) as db:
        db.execute("alter table op rename column decided_at to decided")
    assert main([*both, "--out", str(tmp_path)]) == 1
    ended = capsys.readouterr()
    assert found(other) == {("published_after_rollback", f"{flipped}-0")}
    assert "eu: " in ended.err
    assert ended.out.splitlines()[-1] == "findings in us; failed: eu"
    [failed] = rows(dsn, "select state, error from reconciliation_run")
    assert failed["state"] == "failed"
    assert "decided_at" in failed["error"]
    assert "The run failed for eu." in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_signal_ends_all_and_says_what_was_written(dsn: str, other: str, both: list[str], tmp_path: Path) -> None:
    several = {"HALFNOTE_DATABASE_URLS": f"eu={dsn} us={other}"}
    with psycopg.connect(other) as upkeep:
        upkeep.execute(f"lock table {partition_name('half', DAY)} in access exclusive mode")
        process = start_proof(dsn, tmp_path, "--day", DAY, "--out", tmp_path / "out", **several)
        assert process.stderr is not None
        # The first one has chosen its days, and the second one waits for the lock.
        while '"installation": "eu"' not in (line := process.stderr.readline()):
            assert line, process.wait()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Results were written of: no installation." in said
    assert "Ended by SIGTERM." in said
    assert "Traceback" not in said
    assert [rows(url, "select from reconciliation_run") for url in (dsn, other)] == [[], []]
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_ledger_may_have_the_transactions_of_both(dsn: str, other: str, both: list[str], tmp_path: Path) -> None:
    ids = [str(row["transaction_id"]) for url in (dsn, other) for row in rows(url, "select transaction_id from op")]
    nowhere = f"{ids[0][:24]}{'f' * 12}"
    producer, consumer = tmp_path / "producer.csv", tmp_path / "consumer.csv"
    producer.write_text("\n".join(["transaction_id,verdict", *(f"{one},commit" for one in [*ids, nowhere])]))
    consumer.write_text("\n".join(["message_id", *(f"{one}-0" for one in [*ids, ids[-1], nowhere])]))
    ledgers = ["--producer-ledger", str(producer), "--consumer-ledger", str(consumer)]
    assert main([*both, *ledgers]) == 3
    # The first one reports what is in no installation.
    assert found(dsn) == {("ledger_not_sent", nowhere), ("consumed_not_sent", f"{nowhere}-0")}
    assert found(other) == {("consumed_twice", f"{ids[-1]}-0")}
