"""The cost of API keys: CPU time of the API per `/half`, in pairs of slices with and without keys."""

from contextlib import AsyncExitStack
from statistics import median

from app.operations.api_keys import make_key
from app.permissions import Caller, Role
from app.schemas.api_keys import ApiKeyNew
from bench.payload import GROUP, TOPIC
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, connected, halfnote
from bench.statistic import median_interval
from bench.wrk import load

# The number of other keys in the table.
KEYS, KEYS_QUICK = 1000, 10
# The bar, as a multiple of the CPU time of a request without keys.
MOST = 1.05
PAIRS, PAIRS_QUICK = 20, 2
SLICE_S = 5
EMPTY = "truncate half, op, outbox, receipt, attempt"


async def bench(stage: Stage) -> Report:
    """Load a service with keys and one without keys in turn."""
    report = Report("keys", "keys: /half with an API key against auth off, CPU of the API")
    off, on = await stage.database("keys_off"), await stage.database("keys_on")
    key, admin = await _make_keys(on, KEYS_QUICK if stage.quick else KEYS)
    env = {"HALFNOTE_AUTH": "keys", "HALFNOTE_ADMIN_KEY": admin}
    async with AsyncExitStack() as open_:
        receiver = await open_.enter_async_context(receiving())
        without = await open_.enter_async_context(halfnote(stage, off, receiver))
        asking = await open_.enter_async_context(halfnote(stage, on, receiver, env=env, key=admin))
        watch = [await open_.enter_async_context(connected(dsn)) for dsn in (off, on)]
        sides = {"auth off": (without, None), "with a key": (asking, key)}
        pairs = []
        # The first pair warms up both services.
        for turn in range(stage.seconds(PAIRS, PAIRS_QUICK) + 1):
            found = {}
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                service, sent = sides[name]
                found[name] = await _slice(stage, service, sent)
            if turn:
                pairs.append((found["auth off"], found["with a key"]))
            for connection in watch:
                await connection.execute(EMPTY)
    ratios = [with_key / plain for plain, with_key in pairs]
    low, high, confidence = median_interval(ratios)
    report.add("auth off", median(plain for plain, _ in pairs), "µs/request")
    report.add("with a key", median(one for _, one in pairs), "µs/request", ratio_to="auth off", ratio=median(ratios))
    report.notes.append(
        f"{median(ratios):.3f}; {low:.3f} to {high:.3f} holds the median with {confidence:.1%} confidence "
        f"({len(pairs)} pairs)"
    )
    report.hold("CPU of /half with a key", median(ratios), at_most=MOST, interval=(low, high))
    await stage.drop("keys_off", "keys_on")
    return report


async def _make_keys(dsn: str, count: int) -> tuple[str, str]:
    """Make the keys; return the key of a producer, with the usual scope, and an admin key."""
    actor = Caller(None, name="bench")
    others = ApiKeyNew(name="other", role=Role.PRODUCER, producer_groups=["other.*"], topics=["other.*"])
    producer = ApiKeyNew(name=GROUP, role=Role.PRODUCER, producer_groups=[GROUP], topics=[TOPIC, f"{TOPIC}.*"])
    async with connected(dsn) as connection, connection.transaction():
        now = await connection.fetchval("select clock_timestamp()")
        for _ in range(count):
            await make_key(connection, actor, others, now)
        key, _ = await make_key(connection, actor, producer, now)
        admin, _ = await make_key(connection, actor, ApiKeyNew(name="bench", role=Role.ADMIN), now)
    return key, admin


async def _slice(stage: Stage, service: Service, key: str | None) -> float:
    """Return the CPU time of the API per request, in µs."""
    return (await load(stage.place, service, "half", stage.seconds(SLICE_S), key=key)).cpu_us
