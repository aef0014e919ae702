"""`scripts/failed-once-more`: only a test that runs again and passes is flaky."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TEST = "test_it.py::test_it"
SCRIPT = Path(__file__).parents[2] / "scripts" / "failed-once-more"
FAILS = "def test_it():\n    raise AssertionError\n"
PASSES = "def test_it():\n    pass\n"
# As tests/support/selection.py does after HALFNOTE_TEST_UNTIL.
CONFTEST = """
import os
import pytest

def pytest_runtest_setup():
    if os.environ.get("HALFNOTE_TEST_UNTIL"):
        pytest.skip("not reached")
"""


def once_more(folder: Path, test: str, *arguments: str, status: int | None = 1, failed: Iterable[str] = (TEST,)) -> int:
    """Run the script in a folder with a test, after a run with an exit status (None: none was written)."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    cache = folder / ".pytest_cache" / "v"
    for name in ("cache", "halfnote"):
        (cache / name).mkdir(parents=True)
    if failed:
        (cache / "cache" / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    if status is not None:
        (cache / "halfnote" / "exit_status").write_text(str(status))
    # The plugins of this environment take seconds to import.
    environment = {**os.environ, "HALFNOTE_TEST_UNTIL": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True)
    return done.returncode


def test_a_test_that_passes_alone_is_flaky(tmp_path: Path) -> None:
    assert once_more(tmp_path, PASSES) == 0


def test_a_test_that_fails_again_is_an_error_also_after_the_time_limit(tmp_path: Path) -> None:
    assert once_more(tmp_path, FAILS) == 1


def test_all_tests_of_a_file_run_again_but_not_tests_of_many_files(tmp_path: Path) -> None:
    several = "import pytest\n@pytest.mark.parametrize('number', range(6))\ndef test_it(number):\n    pass\n"
    of_one_file = [f"test_it.py::test_it[{number}]" for number in range(6)]
    of_four_files = [f"test_{number}.py::test_it" for number in range(4)]
    for number, (failed, code) in enumerate(((of_one_file, 0), (of_four_files, 1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for test in failed:
            (folder / test.partition("::")[0]).write_text(PASSES)
        assert once_more(folder, several, failed=failed) == code
    many = [f"test_it.py::test_it[{number}]" for number in range(21)]
    folder = tmp_path / "many"
    folder.mkdir()
    assert once_more(folder, several.replace("range(6)", "range(21)"), failed=many) == 1


def test_a_run_that_broke_off_is_an_error(tmp_path: Path) -> None:
    for number, status in enumerate((None, 2, 3, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert once_more(folder, PASSES, status=status) == 1


def test_a_run_that_the_time_limit_cut_is_an_error_only_for_what_fails_again(tmp_path: Path) -> None:
    for number, (test, failed, code) in enumerate(((PASSES, (), 0), (PASSES, (TEST,), 0), (FAILS, (TEST,), 1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert once_more(folder, test, "--if-any", status=2, failed=failed) == code
