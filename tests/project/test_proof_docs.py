"""The pages of the nightly proof name the kinds, options, exit statuses and schedules of the code."""

import ast
import configparser
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.finding_kinds import MEANINGS, Kind
from spark.report.finding_texts import MEANINGS as REPORTED
from spark.transforms.rules import RULES
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "reconciliation.md").read_text()
FINDINGS = ROOT / "docs" / "findings"


def blocks(language: str) -> list[str]:
    """The page's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_rule_has_its_kind_and_page_and_the_report_the_same_words() -> None:
    assert [rule.kind for rule in RULES] == [str(kind) for kind in Kind]
    assert {rule.page for rule in RULES} == {f"docs/findings/{file.stem}.md" for file in FINDINGS.glob("[a-z]*.md")}
    assert {kind: tuple(meaning) for kind, meaning in MEANINGS.items()} == REPORTED
    index = (FINDINGS / "README.md").read_text()
    for kind, meaning in MEANINGS.items():
        assert f"| [`{kind}`]({kind}.md) | {meaning.means} |" in index


@pytest.mark.parametrize("kind", list(Kind))
def test_a_kinds_page_says_what_it_means_how_it_comes_what_to_do_and_when_it_is_harmless(kind: Kind) -> None:
    text = (FINDINGS / f"{kind}.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == ["Causes", "What to do", "When it is harmless"]
    assert "Subject: " in " ".join(text.split())


@pytest.mark.parametrize("command", ["reconcile", "archive", "restore", "redact"])
def test_options_that_are_named_exist(command: str) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", f"spark.jobs.{command}", "--help"],
        cwd=ROOT,
        # So wide that no name is broken.
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    known = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", asked.stdout))
    used = [line for line in PAGE.splitlines() if re.search(rf"\bhalfnote {command}\b", line)]
    assert used
    named = {option for line in used for option in re.findall(r"(?<![\w-])--[a-z-]+", line.partition("#")[0])}
    assert named <= known
    if command == "reconcile":
        table = PAGE.partition("| option |")[2].partition("\n\n")[0]
        listed = set(re.findall(r"`(--[a-z-]+)", table))
        assert known - listed == {"--help"}


def test_exit_statuses_are_those_of_the_program() -> None:
    from spark.jobs import reconcile

    documented = dict(re.findall(r"^\| (\d) \| (.*) \|$", PAGE, re.MULTILINE))
    assert {str(one) for one in (reconcile.PROVED, reconcile.FINDINGS, reconcile.FAILED, reconcile.USAGE)} == set(
        documented
    )
    assert documented[str(reconcile.PROVED)].startswith("proved")
    assert "findings" in documented[str(reconcile.FINDINGS)]
    assert "failed" in documented[str(reconcile.FAILED)]
    assert "wrong usage" in documented[str(reconcile.USAGE)]


def test_schedules_can_be_read_by_what_they_are_for() -> None:
    [job] = map(yaml.safe_load, blocks("yaml"))
    spec: dict[str, Any] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert (job["kind"], job["spec"]["concurrencyPolicy"]) == ("CronJob", "Forbid")
    assert spec["containers"][0]["command"][:2] == ["halfnote", "reconcile"]
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == {
        one["name"] for one in spec["volumes"]
    }
    service, timer = blocks("ini")
    for unit, section in ((service, "Service"), (timer, "Timer")):
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_file(io.StringIO(unit))
        assert section in parser
    [dag] = blocks("python")
    ast.parse(dag)
    # In /etc/cron.d the user follows the five fields.
    lines = re.findall(r"^\d+ \d+ \* \* \*  halfnote  /opt/halfnote/bin/halfnote (\w+)", PAGE, re.MULTILINE)
    assert lines == ["reconcile", "archive"]


@pytest.mark.parametrize("status", [0, 1])
def test_cron_mails_a_status_other_than_0(tmp_path: Path, status: int) -> None:
    """cron mails what is printed; the reason of a failure is in the log."""
    table = PAGE.partition("\nMAILTO=")[2].partition("```")[0]
    assert {"HALFNOTE_DATABASE_URL", "HALFNOTE_ARCHIVE"} <= set(re.findall(r"^(\w+)=", table, re.MULTILINE))
    program = tmp_path / "halfnote"
    program.write_text(f"#!/bin/sh\necho why >&2\nexit {status}\n")
    program.chmod(0o755)
    commands = re.findall(r"^\d+ \d+ \* \* \*  halfnote  (.*)$", table, re.MULTILINE)
    for command, name in zip(commands, ("proof", "archive"), strict=True):
        here = command.replace("/opt/halfnote/bin/halfnote", str(program)).replace("/var/log/halfnote", str(tmp_path))
        ran = subprocess.run(["/bin/sh", "-c", here], capture_output=True, text=True, check=True)
        assert (ran.stdout, ran.stderr) == (f"The {name} ended with {status}\n" if status else "", "")
        assert (tmp_path / f"{name}.log").read_text() == "why\n"
