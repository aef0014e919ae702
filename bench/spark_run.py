"""Run the proof and its generator as separate programs; take times from their output and measure their memory."""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.services import ROOT
from bench.wrk import BrokenRunError

CORES = "local[2]"
LOOK_EVERY_S = 0.2
PROVED, FINDINGS = 0, 3

Heard = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class Run:
    """A run of the proof.

    `stages`: seconds by name. `notes` and `said`: its other lines. `seconds`: from its first stage to its result, so
    without the start of Spark's session. `highest_mb`: the most resident memory of JVM and Python together.
    """

    stages: dict[str, float] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    began_s: float = float("inf")
    ended_s: float = 0.0
    highest_mb: float = 0.0
    status: int = -1

    @property
    def seconds(self) -> float:
        """The time from the beginning of the first stage to the result."""
        return self.ended_s - self.began_s

    @property
    def read_s(self) -> float:
        """How long the snapshot was held: from its beginning to the end of the last read."""
        return self.stages["snapshot"]

    @property
    def join_s(self) -> float:
        """The time of the rules and of writing their findings beside the rows that were read."""
        return self.stages["join"] + self.stages["rules"]

    @property
    def figures_s(self) -> float:
        """The time of the figures for the report's plots and of the causes that keep the day from being final."""
        return self.stages["figures"] + self.stages["waiting"]

    @property
    def write_s(self) -> float:
        """The other time: writing run, day and findings into the database, Parquet and the report."""
        return self.seconds - self.stages.get("snapshot", 0.0) - self.join_s - self.figures_s

    def hear(self, line: dict[str, Any], now_s: float) -> None:
        """Read one line of output: the end of a stage, or another message."""
        if "stage" in line:
            self.stages[line["stage"]] = self.stages.get(line["stage"], 0.0) + line["seconds"]
            self.began_s = min(self.began_s, now_s - line["seconds"])
        else:
            self.notes.append(line)


async def reconcile(*arguments: str, heard: Heard | None = None) -> Run:
    """Run the proof with two cores; `heard` is awaited with each line of its output.

    Raises BrokenRunError with its output if it failed.
    """
    command = (sys.executable, "-m", "spark.jobs.reconcile", "--master", CORES, *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    run = Run()
    watching = asyncio.create_task(_watch(run, process.pid))
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(_lines(run, process.stderr, heard), _verdict(run, process.stdout))
        run.status = await process.wait()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if run.status not in (PROVED, FINDINGS):
        raise BrokenRunError(f"The proof ended with {run.status}: {' | '.join(run.said[-10:])}")
    return run


async def _lines(run: Run, stream: asyncio.StreamReader, heard: Heard | None) -> None:
    async for raw in stream:
        now_s, text = time.monotonic(), raw.decode().strip()
        try:
            line = json.loads(text)
        except ValueError:
            run.said.append(text)
            continue
        run.hear(line, now_s)
        if heard is not None:
            await heard(line)


async def _verdict(run: Run, stream: asyncio.StreamReader) -> None:
    async for raw in stream:
        run.ended_s = time.monotonic()
        run.said.append(raw.decode().strip())


async def _watch(run: Run, pid: int) -> None:
    while True:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            resident = 0
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    resident += process.memory_info().rss
            run.highest_mb = max(run.highest_mb, resident / 2**20)
        await asyncio.sleep(LOOK_EVERY_S)


@dataclass(frozen=True, slots=True)
class Generated:
    """How many rows were made, and in how many seconds, including the start of Spark."""

    rows: int
    seconds: float


async def generate(*arguments: str) -> Generated:
    """Run the generator. Raises BrokenRunError with its output if it failed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "spark.jobs.generate", "--master", CORES, *arguments),
        cwd=ROOT,
        env=_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    found = re.search(r"([\d,]+) rows in ([\d.]+) s", out.decode())
    if process.returncode or found is None:
        raise BrokenRunError(f"The generator ended with {process.returncode}: {err.decode()[-2000:]}")
    return Generated(int(found[1].replace(",", "")), float(found[2]))


def _environment() -> dict[str, str]:
    """This program's environment without settings of the service or of Spark, which would change the measurement."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HALFNOTE_", "SPARK_"))}
    jar = os.environ.get("HALFNOTE_JDBC_JAR")
    # Unbuffered, so that the result arrives when it is printed and not when the program ends.
    return kept | {"PYTHONUNBUFFERED": "1"} | ({"HALFNOTE_JDBC_JAR": jar} if jar else {})


def parquet_of(out: Path) -> str:
    """Return the path of the findings of a run with `--out`, for DuckDB."""
    return f"{out}/findings/*/*.parquet"


def spread(values: Sequence[float]) -> str:
    """Return values for a note."""
    return ", ".join(f"{value:.1f}" for value in values)
