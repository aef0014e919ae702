"""`halfnote status`."""

from datetime import UTC, datetime, timedelta

import pytest

from app.cli.status import print_status
from app.cli.tables import age, bytes_text, duration
from tests.support.cli_runs import Run, run

__all__ = ["run"]

AT = datetime(2026, 11, 21, 8, tzinfo=UTC)


def ago(**by: float) -> str:
    return (AT - timedelta(**by)).isoformat()


def test_the_status_of_a_service(run: Run) -> None:
    found = run("status", "--json").json
    assert found["in_doubt"].keys() == {"count", "exact", "oldest", "oldest_born_at"}
    shown = run("status")
    assert shown.code == 0
    assert shown.out.startswith("FIGURE")
    for words in ("in doubt", "transactions list --state parked", "last proof", "failed attempts"):
        assert words in shown.out


def test_each_figure_has_its_oldest_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = {"count": 1234, "per_s": 1.5}
    names = ("halves", "commits", "rollbacks", "deliveries", "failed_attempts", "checks")
    window = dict.fromkeys(names, done)
    print_status(
        {
            "at": AT.isoformat(),
            "in_doubt": {"count": 10_000, "exact": False, "oldest_born_at": ago(minutes=12)},
            "parked": {"count": 1, "exact": True, "oldest_born_at": ago(days=3)},
            "dead_letters": {"count": 2, "exact": True, "oldest_at": ago(hours=5)},
            "breakers": {
                "count": 5,
                "first": [{"subscription": f"s{n}", "opened_at": ago(seconds=30)} for n in range(5)],
            },
            "subscriptions": {"active": 9, "paused": 1, "disabled": 0},
            "lag": {"subscription": "mailer", "messages": 10_000, "exact": False, "seconds": 61.25},
            "activity": [window, window],
            "held_days": [{"day": "2026-11-01", "causes": ["in_doubt", "undelivered:mailer"]}],
            "disk": {"database_bytes": 1_200_000_000, "free_bytes": 20_000_000_000},
            "workers": {"present": 2, "unheld_shards": 3},
            "proof": {"state": "findings", "ended_at": ago(hours=6), "open_findings": 4},
        }
    )
    lines = " ".join(capsys.readouterr().out.split())
    for words in (
        "in doubt about 10,000, oldest 12 min ago transactions list --state in_doubt",
        "parked 1, oldest 3 d ago",
        "dead letters 2, oldest 5 h ago dead-letters list",
        "open breakers s0 (opened 30 s ago),",
        "2 more",
        "oldest lag mailer: 10,000 or more messages, 61.2 s",
        "9 active, 1 paused, 0 disabled",
        "2026-11-01: in_doubt, undelivered:mailer",
        "1.2 GB, 20.0 GB free",
        "2, 3 shards without a worker",
        "findings 6 h ago, 4 open findings",
        "failed attempts 1,234 1.5 1,234 1.5",
    ):
        assert words in lines, (words, lines)


def test_times_and_sizes_have_one_unit() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    assert age((AT + timedelta(hours=1)).isoformat(), AT) == "in 1 h"
    assert [bytes_text(count) for count in (999, 1500, 10**15)] == ["999 B", "1.5 kB", "1000.0 TB"]
