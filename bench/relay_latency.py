"""The time from an acknowledged commit to the arrival at the receiver, at 500 messages per second."""

import asyncio
from statistics import median

from bench.arrivals import Arrival, came, now_s
from bench.latency import no_collections
from bench.payload import GROUP, TOPIC, end_body, half_body, request, transaction_ids
from bench.relay_stage import WARM, Relaying, relaying
from bench.report import Report
from bench.services import Service, serving
from bench.stage import IMMUNITY_S, Stage, put
from bench.statistic import percentile
from bench.wire import Wire, paced

RATE = 500
CONNECTIONS = 32
ROUNDS, ROUND_S, ROUND_S_QUICK = 4, 8, 3
# The time limit for the last messages of a round.
LAST_S = 10.0


async def bench(stage: Stage, report: Report) -> None:
    """Send whole transactions at a fixed rate to one API process while one worker delivers the messages."""
    rounds: list[list[float]] = []
    async with relaying(stage, "relay_latency") as relay:
        env = {"HALFNOTE_DATABASE_URL": relay.dsn, "HALFNOTE_ROLE": "api"}
        async with serving("app.main:app", stage.place, env) as api:
            group = {"check_urls": [f"{relay.receiver.url}/check"], "immunity_s": IMMUNITY_S}
            await put(api, f"/producer-groups/{GROUP}", group)
            await relay.subscribe(1, TOPIC)
            await relay.drain(TOPIC, WARM)
            await _round(relay, api, 1)
            with no_collections():
                for _ in range(stage.seconds(ROUNDS)):
                    rounds.append(await _round(relay, api, stage.seconds(ROUND_S, ROUND_S_QUICK)))
    for name, share, at_most in (("p50", 0.5, 20), ("p99", 0.99, 150)):
        taken_ms = median(percentile(run, share) for run in rounds) * 1000
        report.add(f"commit acknowledged to received, {RATE}/s, {name}", taken_ms, "ms")
        report.hold(f"{name} from the acknowledged commit to the receiver at {RATE}/s, ms", taken_ms, at_most=at_most)


async def _round(relay: Relaying, api: Service, seconds: int) -> list[float]:
    """Return the seconds that each message of a round took, at RATE messages per second."""
    ids = transaction_ids(RATE * seconds)
    requests = [(request("/half", half_body(id_), api.port), request("/end", end_body(id_), api.port)) for id_ in ids]
    wires = [await Wire.to(api.port) for _ in range(CONNECTIONS)]
    acknowledged: dict[str, float] = {}

    async def act(n: int) -> None:
        wire = wires.pop() if wires else await Wire.to(api.port)
        if wire.closed:
            wire = await Wire.to(api.port)
        half, end = requests[n]
        await wire.ask(half)
        await wire.ask(end)
        acknowledged[ids[n]] = now_s()
        wires.append(wire)

    await paced(RATE, seconds, act)
    arrivals = await came(relay.receiver, len(ids), LAST_S, relay.workers)
    for wire in wires:
        wire.close()
    await asyncio.sleep(0)
    return taken(acknowledged, arrivals)


def taken(acknowledged: dict[str, float], arrivals: list[Arrival]) -> list[float]:
    """Return the seconds from each acknowledgement to the arrival; negative if the message arrived first."""
    return [arrival.at_s - acknowledged[arrival.transaction_id] for arrival in arrivals]
