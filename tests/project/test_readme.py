"""Commands, paths and options in the README and the docs exist, and their commands of order 1030 succeed."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from app.cli.commands import app as cli
from app.config import OTHER_VARIABLES, Settings
from scripts import config_docs
from tests.support.processes import ROOT, Service, free_port

README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "examples" / "order_1030" / "README.md"]
# Options of earlier versions, which decisions may name.
REMOVED_VARIABLES = {"POLL_S"}


def commands(group: typer.Typer = cli, before: str = "halfnote") -> Iterator[str]:
    """Every command of the command line, such as `halfnote groups put`."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{before} {command.name or command.callback.__name__}"
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield f"{before} {inner.name}"
        yield from commands(inner.typer_instance, f"{before} {inner.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_anchors_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_make_targets_that_are_named_exist_and_every_target_is_explained() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    pages = [README, (ROOT / "CONTRIBUTING.md").read_text()]
    named = {target for page in pages for target in re.findall(r"(?:^|`)make ([a-z-]+)", page, re.MULTILINE)}
    named |= set(re.findall(r"`make ([a-z-]+)", (ROOT / "CHANGELOG.md").read_text()))
    assert {"run", "demo", "test"} <= named <= targets
    explained = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert targets == {line.split()[0] for line in explained.splitlines()}


def test_commands_that_are_named_exist() -> None:
    known = set(commands())
    named = [
        words.split() for page in PAGES for words in re.findall(r"`(?:\.venv/bin/)?halfnote ([^`]*)`", page.read_text())
    ]
    assert named
    for first, *rest in named:
        assert f"halfnote {first}" in known
        groups = [word for word in rest if re.fullmatch(r"[a-z-]+", word) and not word.startswith("--")]
        if any(command.startswith(f"halfnote {first} ") for command in known):
            assert all(f"halfnote {first} {word}" in known for word in groups), (first, groups)


def test_variables_that_are_named_exist() -> None:
    known = {name.upper() for name in Settings.model_fields} | set(OTHER_VARIABLES)
    for page in PAGES:
        removed = REMOVED_VARIABLES if page.parent.name == "decisions" else set()
        assert set(re.findall(r"HALFNOTE_([A-Z_]+[A-Z])", page.read_text())) <= known | removed, page


def test_the_page_of_options_is_what_the_code_says() -> None:
    assert config_docs.PAGE.read_text() == config_docs.page(), "run `make docs`"
    for name in Settings.model_fields:
        assert f"| `HALFNOTE_{name.upper()}` |" in config_docs.page()


def test_ci_runs_the_checks_and_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.search(r"^make check$", script.read_text(), re.MULTILINE)
    assert re.search(r"^tests make test$", script.read_text(), re.MULTILINE)


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:24])
    assert "make run" in first_screen
    assert "make demo" in first_screen
    assert "It is for teams" in first_screen


def test_the_readme_gives_six_figures_of_the_page_of_benchmarks() -> None:
    figures = README.partition("## How fast")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in figures.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in rows:
        for number in re.findall(r"[\d.,]*\d", row[2] + row[4]):
            assert number in benchmarks, number


def test_the_index_names_every_page_of_docs() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    listed = set(re.findall(r"\]\(([^)#\s]+)", index))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= listed
    for folder in (ROOT / "docs").iterdir():
        if folder.is_dir():
            assert any(target.startswith(f"{folder.name}/") for target in listed), folder


def by_hand() -> str:
    """The README's block of five curl calls."""
    [block] = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return str(block)


def test_there_are_five_calls() -> None:
    assert len(re.findall(r"\bcurl\b", by_hand())) == 5


async def test_order_1030_by_hand(data_dir: Path, dsn: str) -> None:
    [secret, start] = re.findall(
        r"^DEMO_SECRET=(\S+) \.venv/bin/(python -m demo\.receiver) --port 9031$", README, re.MULTILINE
    )[0]
    assert start
    service, port = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn), free_port()
    await service.start()
    receiver = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "demo.receiver",
        "--port",
        str(port),
        cwd=ROOT,
        env=os.environ | {"DEMO_SECRET": secret},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        script = by_hand().replace("http://127.0.0.1:8080", service.url).replace("9031", str(port))
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        printed, _ = await shell.communicate()
        assert shell.returncode == 0
        answers = [json.loads(part) for part in printed.decode().replace("}{", "}\n{").splitlines()]
        assert answers[-1]["state"] == "committed"
        assert [message["key"] for message in answers[-1]["messages"]] == ["order-1030"]
        assert receiver.stdout is not None
        async with asyncio.timeout(30):
            assert b"order 1030 delivered, signature verified" in await receiver.stdout.readline()
    finally:
        receiver.terminate()
        await receiver.wait()
        service.stop()
