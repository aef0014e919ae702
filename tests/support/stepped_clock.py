"""A clock for processes, which a test steps while they run: stepped_clock.c, preloaded into them."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import absent


class SteppedClock:
    """A clock for processes started with `env`, and for their children; `set` steps it while they run."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "seconds"
        self._file.write_bytes(bytes(8))
        self._file.chmod(0o644)
        library = directory / "stepped_clock.so"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's."""
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


@contextmanager
def stepped_clock() -> Iterator[SteppedClock]:
    """Make a clock that is not stepped yet. Skips the test where none can be made."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        absent("a C compiler on Linux is needed to step a process's clock", "DEPS")
    # Not in pytest's directory, which only its owner may enter: Postgres may run as another user.
    with tempfile.TemporaryDirectory(prefix="halfnote-clock-") as directory:
        Path(directory).chmod(0o755)
        yield SteppedClock(Path(directory))
