"""`halfnote workers`."""

from tests.support.cli_runs import Run, run

__all__ = ["run"]


def test_the_workers_of_a_service(run: Run) -> None:
    found = run("workers", "--json").json
    assert found.keys() == {"items", "unheld"}
    shown = run("workers")
    assert shown.code == 0
    assert shown.out.startswith("WORKER")
