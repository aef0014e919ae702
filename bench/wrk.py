"""Load by wrk, which needs at most one core: 64 connections, one thread, requests made in Lua."""

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.payload import end_body, half_body, template, transaction_ids
from bench.services import Service

CONNECTIONS = 64

# An answer that takes longer makes the figures useless.
PATIENCE_S = 2

# Stored halves per connection before a `whole` run, because pools are not fair and a half may wait for long.
LEAD = 32

Plan = Literal["half", "end", "whole"]
Fill = Callable[[list[str]], Awaitable[None]]

# Ids per second of load, far above the rate of any row: an echo is fast, and the halves of an `end` run are stored
# before.
IDS_A_SECOND: dict[Plan, int] = {"half": 100_000, "end": 60_000, "whole": 25_000}

MISSING = "The benchmarks' load comes from wrk, which is not installed. On Debian and Ubuntu: apt install wrk. "
MISSING += "On macOS: brew install wrk."

# The script has no response callback, which would make wrk the slow part. The ids are chosen here, so no answer is
# needed.
LUA = """
local ids, sent, looked_at = {}, 0, false
for id in io.lines(@IDS@) do ids[#ids + 1] = id end

local function half(k) return @HALF_BEFORE@ .. ids[(k - 1) % #ids + 1] .. @HALF_AFTER@ end
local function finish(k) return @END_BEFORE@ .. ids[(k - 1) % #ids + 1] .. @END_AFTER@ end

local plans = {}
plans["half"] = half
plans["end"] = finish
-- Alternate an end and a half. The half is @LEAD@ ids ahead (earlier halves are stored before the run), so that the
-- half of each end was answered long before.
plans["whole"] = function(k)
  if k % 2 == 1 then return finish((k + 1) / 2) end
  return half(@LEAD@ + k / 2)
end
local plan = plans[@PLAN@]

function request()
  -- wrk calls this once before it starts and never sends that request.
  if not looked_at then
    looked_at = true
    return plan(1)
  end
  sent = sent + 1
  return plan(sent)
end

function done(summary, latency, requests)
  local e = summary.errors
  local form = '\\nRESULT {"requests": %d, "us": %d, "refused": %d, "broken": %d, "late": %d, "p50": %d, "p99": %d}\\n'
  io.write(string.format(form, summary.requests, summary.duration, e.status, e.connect + e.read + e.write, e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


class BrokenRunError(Exception):
    """A run with useless figures: requests were refused or failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """The result of a run of wrk: requests answered, seconds, latencies in ms, and the API's CPU time in seconds."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of the API per request, in µs."""
        return self.cpu_s / self.requests * 1e6


def lua(
    plan: Plan, ids: Path, *, port: int, half: str = "/half", end: str = "/end", lead: int = 0, key: str | None = None
) -> str:
    """Return the script that sends the ids of the file `ids` in the order of `plan` to the paths `half` and `end`."""
    half_before, half_after = template(half, half_body(), port, key)
    end_before, end_after = template(end, end_body(), port, key)
    values = {
        "IDS": str(ids),
        "PLAN": plan,
        "HALF_BEFORE": half_before.decode(),
        "HALF_AFTER": half_after.decode(),
        "END_BEFORE": end_before.decode(),
        "END_AFTER": end_after.decode(),
    }
    script = LUA.replace("@LEAD@", str(lead))
    for name, value in values.items():
        # A JSON string of ASCII is also a Lua string.
        script = script.replace(f"@{name}@", json.dumps(value))
    return script


def require_wrk() -> None:
    """Raise SystemExit with the way to install wrk, if it is missing."""
    if shutil.which("wrk") is None:
        raise SystemExit(MISSING)


async def load(
    place: Path,
    service: Service,
    plan: Plan,
    seconds: int,
    *,
    half: str = "/half",
    end: str = "/end",
    fill: Fill | None = None,
    connections: int = CONNECTIONS,
    ids_a_second: int | None = None,
    key: str | None = None,
    patience_s: int = PATIENCE_S,
) -> Load:
    """Run wrk for `seconds` and return its result. Raises BrokenRunError unless every answer is 2xx and in time.

    `key` is an API key to send. `fill` stores halves before the run: all halves of an `end` run, and the lead of a
    `whole` run. An answer after `patience_s` seconds counts as an error.
    """
    ids = transaction_ids(seconds * (ids_a_second or IDS_A_SECOND[plan]))
    listed, script, lead = place / "ids", place / "load.lua", LEAD * connections
    listed.write_text("\n".join(ids) + "\n")
    script.write_text(lua(plan, listed, port=service.port, half=half, end=end, lead=lead, key=key))
    if fill is not None:
        await fill(ids if plan == "end" else ids[:lead])
    cpu_s = service.cpu_s()
    wrk = await asyncio.create_subprocess_exec(
        *("wrk", f"-c{connections}", "-t1", f"-d{seconds}s", f"--timeout={patience_s}s"),
        *("-s", str(script), service.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said = (await wrk.communicate())[0].decode()
    finally:
        if wrk.returncode is None:
            wrk.kill()
    cpu_s = service.cpu_s() - cpu_s
    found = json.loads(said.partition("RESULT ")[2] or "null")
    if found is None:
        raise BrokenRunError(f"wrk failed:\n{said}")
    walked = lead + found["requests"] // 2 if plan == "whole" else found["requests"]
    if found["refused"] or found["broken"] or found["late"] or walked > len(ids):
        raise BrokenRunError(
            f"{plan} on {half}, {end}: {found['requests']} requests, {walked} of {len(ids)} ids, "
            f"{found['refused']} refused, {found['broken']} socket errors, {found['late']} without an answer within "
            f"{patience_s} s; the figures are useless"
        )
    return Load(found["requests"], found["us"] / 1e6, found["p50"] / 1000, found["p99"] / 1000, cpu_s)


async def capacity(place: Path, url: str, headers: Mapping[str, str], body: bytes, seconds: int) -> float:
    """Return how many POSTs of one request a server answers per second. Raises BrokenRunError unless all are 2xx."""
    lines = [f"wrk.headers[{json.dumps(name)}] = {json.dumps(value)}" for name, value in headers.items()]
    script = place / "capacity.lua"
    script.write_text("\n".join(['wrk.method = "POST"', f"wrk.body = {json.dumps(body.decode())}", *lines]) + "\n")
    wrk = await asyncio.create_subprocess_exec(
        *("wrk", f"-c{CONNECTIONS}", "-t1", f"-d{seconds}s", "-s", str(script), url), stdout=asyncio.subprocess.PIPE
    )
    said = (await wrk.communicate())[0].decode()
    found = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    if found is None or "Non-2xx" in said or "Socket errors" in said:
        raise BrokenRunError(f"wrk failed:\n{said}")
    return float(found[1])
