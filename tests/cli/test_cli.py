"""The command line as a whole: wrong usage, problems, addresses, drain, help, keys and secrets."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from halfnote import Verifier

from app.ids import uuid7
from tests.support.cli_requests import answering, group, post_end, post_half, taker
from tests.support.cli_runs import Run, run, run_alone
from tests.support.processes import free_port

__all__ = ["group", "run", "run_alone", "taker"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("transactions", "check"),
        ("transactions", "check", "--group", "shop"),
        ("transactions", "verdict", "commit", "--reason", "r"),
        ("transactions", "verdict", "commit", "--reason", "r", "--force", "--group", "g", "--state", "parked"),
        ("transactions", "verdict", "commit"),
        ("transactions", "show"),
        ("dead-letters", "redeliver"),
        ("dead-letters", "drop", "--yes"),
        ("dead-letters", "drop", "id"),
        ("dead-letters", "drop", "id", "--subscription", "mailer", "--topic", "order"),
        ("dead-letters", "redeliver", "--subscription", "mailer", "--replay", "1"),
        ("groups", "list", "--bogus"),
        ("bogus",),
    ],
)
def test_wrong_usage_ends_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    wrong = run(*arguments)
    assert wrong.code == 2
    assert wrong.err
    assert "Traceback" not in wrong.err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("audit", "--url", "http://127.0.0.1:9", "verify"), "--url"),
        (("audit", "--limit", "7", "verify"), "--limit"),
        (("findings", "--url=http://127.0.0.1:9", "list"), "--url"),
        (("findings", "--limit", "50", "list"), "--limit"),
        (("findings", "--json", "show", "1"), "--json"),
    ],
)
def test_an_option_before_a_command_of_a_group_is_refused(run: Run, arguments: tuple[str, ...], option: str) -> None:
    """The command would not get it: with --url it would ask another service than the named one."""
    refused = run(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"halfnote: Put {option} after the command: halfnote {arguments[0]} ")
    # The address of the environment stands for every command.
    assert run("audit", "verify").code == 0


def test_a_problem_is_told_in_words_and_as_json(run: Run) -> None:
    transaction_id = str(uuid7(datetime.now(UTC) - timedelta(seconds=9)))
    refused = run("transactions", "show", transaction_id)
    assert (refused.code, refused.out) == (1, "")
    for expected in ("Unknown transaction (404)", "No half with this", "/problems/transaction-unknown"):
        assert expected in refused.err
    as_json = run("transactions", "show", transaction_id, "--json")
    assert (as_json.code, as_json.json["status"]) == (1, 404)


def test_a_missing_service_and_another_service_are_named(run: Run, taker: str) -> None:
    nobody = run("groups", "list", "--url", f"http://127.0.0.1:{free_port()}")
    assert nobody.code == 1
    assert "make run" in nobody.err
    assert "--url" in nobody.err
    somebody = run("groups", "list", "--url", taker)
    assert somebody.code == 1
    assert "not as Halfnote does" in somebody.err
    nonsense = run("groups", "list", "--url", "localhost:8080")
    assert nonsense.code == 1
    assert "Traceback" not in nonsense.err


def test_a_redirect_is_no_success(run: Run) -> None:
    """As of an ingress that answers plain HTTP: the change did not reach the service."""
    with answering(308, {"location": "https://halfnote.example.com/"}) as url:
        refused = run("topics", "declare", "order", "--url", url)
    assert (refused.code, refused.out) == (1, "")
    assert "answered 308 and redirects to https://halfnote.example.com/" in refused.err
    with answering(200, {"content-type": "text/html"}, b"<html>") as url:
        assert "not as Halfnote does" in run("topics", "declare", "order", "--url", url).err


def test_drain_refuses_halves_until_it_is_off(run: Run, url: str, group: str) -> None:
    transaction_id = post_half(url, group)
    assert "refused" in run("drain").out
    try:
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            post_half(url, group)
        post_end(url, group, transaction_id, "commit")
    finally:
        on = run("drain", "--off")
    assert "New halves are taken." in on.out
    post_half(url, group)


def test_version_and_help(run: Run) -> None:
    assert run("version").out.strip() == "0.1.0"
    assert run("--version").out == run("version").out
    commands = ("groups", "transactions", "subscriptions", "dead-letters", "serve", "migrate", "drain")
    for arguments in ((), *((command,) for command in commands)):
        shown = run(*arguments, "--help")
        assert shown.code == 0
        assert "Usage: halfnote" in shown.out


def test_keys_are_those_of_the_named_service(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a key in the environment, too: the embedded database of this directory is not the service's."""
    monkeypatch.chdir(tmp_path)
    created = run("keys", "create", "--role", "admin", "--name", "of-the-service", "--json")
    assert created.code == 0, created.err
    assert "of-the-service" in run("keys", "list").out
    assert list(tmp_path.iterdir()) == []
    # A database that is named goes first.
    monkeypatch.setenv("HALFNOTE_DATABASE_URL_FILE", str(tmp_path / "none"))
    refused = run("keys", "list")
    assert (refused.code, refused.err.endswith("Check HALFNOTE_DATABASE_URL_FILE.\n")) == (1, True)


@pytest.mark.parametrize(
    "url", ["mysql://u:s3cret@db/halfnote", "db:5432/halfnote", "postgres", "postgresql://u:s3/cret@db/halfnote"]
)
def test_a_database_url_of_another_kind_is_refused(run_alone: Run, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", url)
    refused = run_alone("migrate")
    assert refused.code == 2
    expected = "HALFNOTE_DATABASE_URL: must be a URL like postgresql://user:password@host:5432/halfnote"
    assert refused.err == f"halfnote: {expected} (percent-encode special characters of the password)\n"


def test_an_unknown_sslmode_is_refused(run_alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", "postgresql://u:s3cret@127.0.0.1:1/halfnote?sslmode=maybe")
    refused = run_alone("migrate")
    assert refused.code == 1
    assert refused.err.startswith("halfnote: The database cannot be used: `sslmode` parameter must be one of")
    assert "s3cret" not in refused.err


def test_a_fault_of_two_settings_names_both(run_alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", "postgresql://db/halfnote")
    monkeypatch.setenv("HALFNOTE_DATABASE_URL_FILE", "/run/secrets/url")
    refused = run_alone("migrate")
    assert refused.code == 2
    assert refused.err == "halfnote: set HALFNOTE_DATABASE_URL or HALFNOTE_DATABASE_URL_FILE, not both\n"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HALFNOTE_RETENTION_S", "3888001", "(3888001) is more than HALFNOTE_MAX_RETENTION_S (3888000)"),
        (
            "HALFNOTE_DELAY_LIMIT_S",
            "3801301",
            "(3801301) is not 86700 (a day and HALFNOTE_ID_SKEW_S) less than HALFNOTE_MAX_RETENTION_S",
        ),
        ("HALFNOTE_AUDIT_KEEP_S", "99999999999999", ": Input should be less than or equal to 3153600000"),
        ("HALFNOTE_DRAIN_S", "inf", ": Input should be a finite number"),
    ],
)
def test_a_time_that_cannot_hold_is_refused_at_the_start(
    run_alone: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    refused = run_alone("migrate")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"halfnote: {name}")
    assert said in refused.err


def test_a_new_signing_secret_is_one_that_groups_and_clients_take(run: Run) -> None:
    first, second = (run("new-signing-secret").out.strip() for _ in range(2))
    assert first.startswith("whsec_")
    assert first != second
    Verifier([first, second])
    name = f"shop-{uuid4().hex[:8]}"
    assert run("groups", "put", name, "--check-url", "http://127.0.0.1:9/check", "--secret", first).code == 0
