"""The wheel, without the checkout: it has what `halfnote serve` needs, and names only commands that are there."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.processes import ROOT

MAIN = "import sys; from app.cli import main; sys.argv[0] = 'halfnote'; main()"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", str(place), str(ROOT)], check=True)
    [wheel] = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place / "site")
    return place / "site"


def test_the_wheel_has_every_file_that_is_no_code(site: Path) -> None:
    packed = {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()}
    listed = subprocess.run(["git", "ls-files", "app", "migrations", "spark"], cwd=ROOT, capture_output=True, text=True)
    files = set(listed.stdout.split())
    assert "spark/report/report.html.j2" in files
    assert files <= packed


def test_the_service_runs_from_the_wheel_and_names_commands_that_are_there(site: Path, data_dir: Path) -> None:
    data_dir.mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    # It precedes the checkout, which is installed for editing.
    environment = kept | {"PYTHONPATH": str(site), "HALFNOTE_PORT": url.rpartition(":")[2]}
    command = [sys.executable, "-P", "-c", MAIN, "serve"]
    with subprocess.Popen(command, cwd=data_dir, env=environment, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            said = [next(service.stdout)]
            while not said[-1].rstrip().endswith("the command line"):
                said.append(next(service.stdout))
            assert httpx.get(f"{url}/readyz").json()["status"] == "ready"
        finally:
            service.terminate()
            service.stdout.read()
    greeting = "".join(said)
    assert f"Halfnote is ready on {url}" in greeting
    assert "make demo" not in greeting
    assert "README.md" not in greeting
    [line] = [line for line in said if line.rstrip().endswith("the command line")]
    assert Path(line.split()[0]).is_absolute()
    assert (data_dir / ".halfnote" / "postgres" / "cluster").is_dir()
