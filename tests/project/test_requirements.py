"""A test whose requirement is missing is skipped; it fails where the requirement is demanded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.requirements import absent


def test_what_is_required_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HELM", "IMAGES"):
        monkeypatch.delenv(f"HALFNOTE_TEST_{name}", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no helm"):
        absent("no helm", "HELM", "IMAGES")
    monkeypatch.setenv("HALFNOTE_TEST_IMAGES", "required")
    with pytest.raises(pytest.fail.Exception, match="no helm"):
        absent("no helm", "HELM", "IMAGES")
    with pytest.raises(pytest.skip.Exception):
        absent("no helm", "HELM")


def pytest_of(target: str) -> str:
    """The line by which a target of make runs pytest."""
    asked = subprocess.run(["make", "-n", "-o", ".venv/.made", target], cwd=ROOT, capture_output=True, text=True)
    [line] = [line for line in asked.stdout.splitlines() if "-m pytest" in line]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "says", "one"),
    [
        ("test-helm", "helm is not installed here", "tests/helm/test_render.py"),
        ("test-image", "images are built by root", "tests/system/test_images.py"),
    ],
)
def test_a_target_fails_where_its_tests_cannot_run(target: str, says: str, one: str, tmp_path: Path) -> None:
    """The target's environment, on a machine that has none of the programs."""
    words = pytest_of(target).split()
    assert one.startswith(tuple(word for word in words if word.startswith("tests/")))
    variables = dict(word.split("=", 1) for word in words if word.startswith("HALFNOTE_TEST_"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_TEST_")}
    nothing = {"PATH": str(tmp_path), "HALFNOTE_KUBE_DIR": str(tmp_path / "kube")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "--maxfail=1", "-p", "no:cacheprovider", "-q", one]
    completed = subprocess.run(
        command, cwd=ROOT, env=inherited | nothing | variables, capture_output=True, text=True, timeout=240
    )
    assert completed.returncode == 1, completed.stdout
    assert says in completed.stdout
