"""The cost of traces for `/half`: off against a service without the code, and on with 1 % of requests recorded."""

from collections import defaultdict
from contextlib import AsyncExitStack
from statistics import median

from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, count_of, halfnote
from bench.statistic import median_interval
from bench.wrk import load

WITHOUT, OFF, ON = "without the code", "off", "on, 1 % recorded"
# The bars for disabled and for recorded traces, as multiples of the CPU time of a request.
OFF_MOST, ON_MOST = 1.01, 1.05
SECONDS = 5


async def bench(stage: Stage) -> Report:
    """Load the three services in turn in short slices, and compare the CPU time of a request in neighboring slices."""
    report = Report("tracing", f"tracing: CPU of the API for a /half, 64 connections, slices of {SECONDS} s by turns")
    databases = {name: await stage.database(f"tracing_{n}") for n, name in enumerate((WITHOUT, OFF, ON))}
    found: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        collector = await stack.enter_async_context(receiving())
        services = {
            WITHOUT: await stack.enter_async_context(
                halfnote(stage, databases[WITHOUT], receiver, app="bench.untraced_app:app")
            ),
            OFF: await stack.enter_async_context(halfnote(stage, databases[OFF], receiver)),
            ON: await stack.enter_async_context(
                halfnote(stage, databases[ON], receiver, env={"HALFNOTE_OTLP_ENDPOINT": collector.url})
            ),
        }
        for service in services.values():
            await _cpu_us(stage, service)
        for turn in range(stage.seconds(30, 3)):
            names = list(services)
            # Each service is first, second and third equally often.
            for name in names[turn % 3 :] + names[: turn % 3]:
                found[name].append(await _cpu_us(stage, services[name]))
        report.add("exports that the collector took", await count_of(collector), "requests")
    _add_figures(report, found)
    await stage.drop(*(f"tracing_{n}" for n in range(3)))
    return report


async def _cpu_us(stage: Stage, service: Service) -> float:
    return (await load(stage.place, service, "half", stage.seconds(SECONDS))).cpu_us


def _add_figures(report: Report, found: dict[str, list[float]]) -> None:
    for name, values in found.items():
        report.add(name, median(values), "µs/request")
    for name, to, most in ((OFF, WITHOUT, OFF_MOST), (ON, OFF, ON_MOST)):
        ratios = [of / against for of, against in zip(found[name], found[to], strict=True)]
        low, high, confidence = median_interval(ratios)
        report.hold(
            f"CPU of /half with traces {name}, of that {to}, {len(ratios)} pairs, {confidence:.0%} interval",
            median(ratios),
            at_most=most,
            interval=(low, high),
        )
