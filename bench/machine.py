"""Describe the machine of a run and the durability settings of the database."""

import os
import platform
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from app.database.connection import connect

DURABILITY = ("fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
# Filesystems in memory make a commit cheap; the settings above do not show them.
IN_MEMORY = ("tmpfs", "ramfs")


async def describe(dsn: str, data: Path) -> dict[str, Any]:
    """Return CPU, cores, memory, versions, and the durability settings as a flush connection sees them."""
    # Connect as the service does, because the service sets synchronous_commit itself.
    connection = await connect(dsn)
    try:
        settings = {
            name: await connection.fetchval("select current_setting($1)", name)
            for name in (*DURABILITY, "shared_buffers", "server_version")
        }
    finally:
        await connection.close()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(data),
        "python": platform.python_version(),
        "python_build": python_build(),
        "uvicorn": version("uvicorn"),
        "postgres": settings["server_version"],
        "shared_buffers": settings["shared_buffers"],
        "durability": {name: settings[name] for name in DURABILITY},
        "load_before": round(os.getloadavg()[0], 2),
    }


def python_build() -> str:
    """Return how the interpreter was built: `optimized`, `distribution`, or `plain`.

    A build from source is plain unless it was configured with `--enable-optimizations`. A plain one takes some 15 %
    more CPU time (decision 0053). The interpreters of distributions are optimized, and do not say so in their
    configuration.
    """
    configured = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    if "--enable-optimizations" in configured:
        return "optimized"
    return "distribution" if sysconfig.get_config_var("prefix") == "/usr" else "plain"


def cpu_model() -> str:
    """Return the name of the processor."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that holds `path`."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def as_text(machine: dict[str, Any]) -> str:
    """Return the description for people, with a warning for each circumstance that makes the figures doubtful."""
    settings = ", ".join(f"{name} = {value}" for name, value in machine["durability"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"Python {machine['python']} ({machine['python_build']} build), uvicorn {machine['uvicorn']}, "
        f"Postgres {machine['postgres']}",
        f"Postgres, the service and the load share them. {settings}, data on {machine['filesystem']}",
    ]
    if machine["filesystem"] in IN_MEMORY:
        lines.append("Warning: the data is in memory, where fsync costs nothing. Set TMPDIR to a directory on a disk.")
    if machine["python_build"] == "plain":
        lines.append(
            "Warning: this Python was built without --enable-optimizations and takes some 15 % more CPU time. "
            "Measure with another: make clean, then make bench PYTHON=/usr/bin/python3"
        )
    if machine["load_before"] > 0.3 * machine["cores"]:
        lines.append(f"Warning: other programs run on this machine (load {machine['load_before']}).")
    return "\n".join(lines)
