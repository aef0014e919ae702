"""How `make audit` reads pip-audit's answers: a missing answer does not count as a good one."""

from pathlib import Path

import pytest

from scripts import audit

KNOWN = {"name": "urllib3", "version": "2.6.0", "vulns": []}
BAD = {
    "name": "jinja2",
    "version": "2.11.2",
    "vulns": [{"id": "PYSEC-2021-66", "fix_versions": ["2.11.3"], "aliases": [], "description": "…"}],
}
SKIPPED = {"name": "aiohttp", "skip_reason": "Dependency not found on PyPI and could not be audited: aiohttp (3.14.5)"}


@pytest.mark.parametrize(
    ("dependencies", "said", "done"),
    [
        ([KNOWN], "1 versions audited by pypi, 0 known vulnerabilities", True),
        ([KNOWN, BAD], "jinja2 2.11.2: PYSEC-2021-66, fixed in 2.11.3", True),
        ([KNOWN, SKIPPED], "not audited: aiohttp", True),
        ([SKIPPED], "no advisory data here, so nothing was audited", False),
        ([], "no advisory data here, so nothing was audited", False),
    ],
)
def test_what_is_printed(dependencies: list[dict[str, object]], said: str, done: bool) -> None:
    text, audited = audit.summary("a.lock", "pypi", audit.read({"dependencies": dependencies}))
    assert said in text
    assert audited is done


@pytest.mark.parametrize(
    ("prints", "status", "said"),
    [
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": []}]}]}', 1, "X-1"),
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}', 0, "0 known vulnerabilities"),
        ("", 0, "NOT AUDITED"),
        ('{"dependencies": [{"name": "a", "skip_reason": "…"}]}', 0, "NOT AUDITED"),
    ],
)
def test_how_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], prints: str, status: int, said: str) -> None:
    (tmp_path / "answer").write_text(prints)
    program = tmp_path / "pip-audit"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/answer"\n')
    program.chmod(0o755)
    assert audit.main(str(program)) == status
    assert said in capsys.readouterr().out
