"""`halfnote search`."""

from tests.support.cli_runs import Run, run

__all__ = ["run"]


def test_what_a_text_names(run: Run) -> None:
    run("subscriptions", "put", "receipts-mailer", "--topic", "order", "--to", "http://127.0.0.1:9/in")
    found = run("search", "receipts", "--json").json
    assert [(one["kind"], one["name"]) for one in found["hits"]] == [("subscription", "receipts-mailer")]
    shown = run("search", "receipts")
    assert shown.code == 0
    assert shown.out.split() == ["KIND", "ID", "OR", "NAME", "WHAT", "subscription", "receipts-mailer"]


def test_a_text_that_names_nothing_fails(run: Run) -> None:
    shown = run("search", "no-such-thing")
    assert shown.code == 1
    assert "no-such-thing" in shown.err
