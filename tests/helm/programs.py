"""What the chart's tests run: Helm and its like, and Kubernetes's own programs, as `make helm-deps` brings them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT
from tests.support.requirements import absent

CHART = ROOT / "helm" / "halfnote"
KUBE = Path(os.environ.get("HALFNOTE_KUBE_DIR", Path.home() / ".cache" / "halfnote" / "kube"))
CRDS = KUBE / "crds"
SCHEMAS = KUBE / "schemas"
KUBERNETES = "1.36.0"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kwok", "helm")


def program(name: str) -> str:
    """Return where a program is; skips the test if it is nowhere, as tests/support/requirements.py says."""
    found = shutil.which(name, path=f"{KUBE / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        absent(f"{name} is not installed here: make helm-deps", "HELM", "IMAGES")
    return found


def require(*places: Path) -> None:
    """Skip the test unless what `make helm-deps` fetches is there."""
    for place in places:
        if not place.exists():
            absent(f"{place} is not there: make helm-deps", "HELM")


def run(command: Sequence[str], *, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the caller judges how it ended."""
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env={**os.environ, **env}, timeout=280, check=False
    )


def rendered(values: Path, *more: str) -> str:
    """Return what `helm template` makes of the chart with a file of values. Fails the test if it makes nothing."""
    helm = [program("helm"), "template", "hn", str(CHART), "--namespace", "prod", "--kube-version", KUBERNETES]
    made = run([*helm, "--values", str(values), *more])
    assert made.returncode == 0, made.stderr
    return made.stdout
