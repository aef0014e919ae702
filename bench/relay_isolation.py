"""20 subscriptions of one worker: how much slower 15 of them are while 3 hang and 2 cannot be reached."""

from statistics import median

from bench.arrivals import Arrival
from bench.relay_stage import Drained, Relaying, relaying
from bench.report import Report
from bench.services import free_port
from bench.stage import Stage
from bench.statistic import median_ratio

TOPIC = "bench.isolation"
GOOD, HANGING, DEAD = 15, 3, 2
BAD = range(GOOD, GOOD + HANGING + DEAD)
ROUNDS = 4
# The messages of one slice to each of the 15: several seconds, because a change of a subscription takes up to one.
COUNT, COUNT_QUICK = 3200, 200


async def bench(stage: Stage, report: Report) -> None:
    """Deliver the same backlog with the bad subscriptions paused and active, in turn."""
    count = COUNT_QUICK if stage.quick else COUNT
    found: dict[bool, list[Drained]] = {False: [], True: []}
    async with relaying(stage, "relay_isolation") as relay:
        for number in range(GOOD):
            await relay.subscribe(number, TOPIC)
        await relay.drain(TOPIC, 20, to=GOOD)
        # The hanging subscriptions occupy connections and never get an answer.
        for number in BAD:
            dead = {"url": f"http://127.0.0.1:{free_port()}/dead"} if number >= GOOD + HANGING else {}
            await relay.subscribe(number, TOPIC, "hang", destination=dead)
        for turn in range(stage.seconds(ROUNDS)):
            # The first slice runs with the bad subscriptions, before any circuit breaker has opened.
            for bad in (True, False) if turn % 2 == 0 else (False, True):
                await _let(relay, bad=bad)
                found[bad].append(await relay.drain(TOPIC, count, to=GOOD))
    _add_figures(report, found)


async def _let(relay: Relaying, *, bad: bool) -> None:
    for number in BAD:
        await (relay.resume if bad else relay.pause)(number)


def _add_figures(report: Report, found: dict[bool, list[Drained]]) -> None:
    without, beside = ([drained.rate for drained in found[bad]] for bad in (False, True))
    ratio = median_ratio(beside, without)
    report.add(f"{GOOD} subscriptions", median(without), "messages/s")
    base = f"{GOOD} subscriptions"
    report.add(
        f"{GOOD} beside {HANGING} that hang, {DEAD} dead", median(beside), "messages/s", ratio_to=base, ratio=ratio
    )
    slowest = [[slowest_rate(drained.arrivals) for drained in found[bad]] for bad in (False, True)]
    report.add("slowest of them", median(slowest[0]), "messages/s")
    worst = median_ratio(slowest[1], slowest[0])
    report.add("slowest beside the bad", median(slowest[1]), "messages/s", ratio_to="slowest of them", ratio=worst)
    first = beside[0] / without[0]
    report.notes.append(f"first slice, when no breaker had opened yet: {first:.2f} of that without the bad ones")
    report.hold(f"{GOOD} subscriptions beside {len(BAD)} bad ones against {GOOD} alone", ratio, at_least=0.9)


def slowest_rate(arrivals: list[Arrival]) -> float:
    """Return the rate of the subscription that finished last, measured from the first arrival of any subscription."""
    last = {arrival.subscription: arrival.at_s for arrival in arrivals}
    return len(arrivals) / len(last) / (max(last.values()) - arrivals[0].at_s)
