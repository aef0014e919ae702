"""`make audit`: check every version in the images' lock files against advisory data.

    python -m scripts.audit PIP_AUDIT

The exit code is 1 if a version has a known vulnerability, and 0 with a message if the data cannot be reached. A version
that the answer skips counts as not audited, because a mirror of the package index may lack advisories.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements-image.lock", "requirements-spark.lock")
SERVICES = ("pypi", "osv")


@dataclass(frozen=True, slots=True)
class Audit:
    """One service's answer about one lock: the number of audited versions, the vulnerable and the skipped ones."""

    audited: int
    vulnerable: Sequence[str]
    skipped: Sequence[str]


def read(report: Mapping[str, Any]) -> Audit:
    """Read pip-audit's JSON."""
    audited, vulnerable, skipped = 0, [], []
    for dependency in report["dependencies"]:
        if "skip_reason" in dependency:
            skipped.append(dependency["name"])
            continue
        audited += 1
        for found in dependency["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no version"
            vulnerable.append(f"{dependency['name']} {dependency['version']}: {found['id']}, fixed in {fixed}")
    return Audit(audited, vulnerable, skipped)


def ask(pip_audit: str, lock: str, service: str) -> Audit | str:
    """Query a service about a lock file, which has all versions and hashes; return the reason if that fails."""
    command = [pip_audit, "--requirement", lock, "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    asked = subprocess.run(  # noqa: S603 - the program that the Makefile names
        [*command, "--vulnerability-service", service, "--format", "json"], cwd=ROOT, capture_output=True, text=True
    )
    try:
        return read(json.loads(asked.stdout))
    except json.JSONDecodeError:
        return (asked.stderr.strip().splitlines() or ["it printed no reason"])[-1][:200]


def summary(lock: str, service: str, audit: Audit | str) -> tuple[str, bool]:
    """Return the text to print, and whether the lock has been audited."""
    if isinstance(audit, str):
        return f"{lock}: {service} could not be asked: {audit}", False
    if not audit.audited:
        return f"{lock}: {service} has no advisory data here, so nothing was audited", False
    lines = [f"{lock}: {audit.audited} versions audited by {service}, {len(audit.vulnerable)} known vulnerabilities"]
    lines += [f"  {vulnerable}" for vulnerable in audit.vulnerable]
    if audit.skipped:
        lines.append(f"  not audited: {', '.join(audit.skipped)}")
    return "\n".join(lines), True


def main(pip_audit: str) -> int:
    """Audit every lock with the first service that has advisory data."""
    found = False
    for lock in LOCKS:
        for service in SERVICES:
            audit = ask(pip_audit, lock, service)
            text, done = summary(lock, service, audit)
            print(text, flush=True)
            if done:
                found = found or bool(isinstance(audit, Audit) and audit.vulnerable)
                break
        else:
            print(f"{lock}: NOT AUDITED; run this on a machine that can reach the advisory data", flush=True)
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
