"""10,000 transactions in doubt at once: checks per second of one worker against the bare client, on one receiver."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import median
from time import perf_counter

import httpx
import msgspec

from app.ids import message_id
from app.secrets.signatures import Secret, headers, new_secret
from bench.bare import bare_client
from bench.filling import fill_ours
from bench.payload import GROUP, TOPIC, as_uuids, transaction_ids
from bench.report import Report
from bench.services import receiving
from bench.stage import IMMUNITY_S, Stage, connected, halfnote, put
from bench.statistic import median_ratio

IN_DOUBT, IN_DOUBT_QUICK = 10_000, 2_000
# The default of HALFNOTE_CHECK_CONCURRENCY: the most checks of one worker at once.
IN_FLIGHT = 64
LONGEST_S = 300

ALL_IN_DOUBT = """
insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at)
select transaction_id, producer_group, 1, clock_timestamp(), clock_timestamp() from half where transaction_id = any($1)
"""
SETTLED = "select count(*) from op where transaction_id = any($1)"


async def bench(stage: Stage) -> Report:
    """Alternate between posts by the bare client and checks by the worker."""
    count = IN_DOUBT_QUICK if stage.quick else IN_DOUBT
    report = Report("checkback", f"checkback: {count:,} in doubt at once, check_max_in_flight {IN_FLIGHT}, one worker")
    dsn = await stage.database("checkback")
    bare: list[float] = []
    ours: list[float] = []
    env = {"HALFNOTE_ROLE": "worker"}
    async with receiving() as receiver, halfnote(stage, dsn, receiver, env=env) as worker:
        url = f"{receiver.url}/check"
        group = {"check_urls": [url], "immunity_s": IMMUNITY_S, "check_max_in_flight": IN_FLIGHT}
        await put(worker, f"/producer-groups/{GROUP}", group)
        for _ in range(stage.seconds(5)):
            ids = transaction_ids(count)
            bare.append(count / await _post_all(url, ids))
            ours.append(count / await _settle_all(dsn, ids))
    report.add("bare client", median(bare), "requests/s")
    ratio = median_ratio(ours, bare)
    report.add("asked and settled", median(ours), "checks/s", ratio_to="bare client", ratio=ratio)
    report.add("check_max_in_flight", IN_FLIGHT, "checks")
    report.hold("checks asked and settled against the bare client's requests", ratio, at_least=0.25)
    await stage.drop("checkback")
    return report


async def _post_all(url: str, ids: list[str]) -> float:
    """Post the body of each check, IN_FLIGHT at once; return the duration in seconds."""
    secrets = [Secret(new_secret())]
    async with bare_client(IN_FLIGHT) as client:
        left = iter([_request(secrets, id_) for id_ in ids])
        started = perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(_post(client, url, left))
        return perf_counter() - started


def _request(secrets: list[Secret], id_: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a check as the worker sends it."""
    (uuid,) = as_uuids([id_])
    now = datetime.now(UTC)
    fields = {
        "transaction_id": uuid,
        "producer_group": GROUP,
        "check": 1,
        "max_checks": 15,
        "born_at": now,
        "context": None,
    }
    message = {"message_id": message_id(uuid, 0), "topic": TOPIC, "key": "customer-77", "tag": None, "headers": None}
    body = msgspec.json.encode({"type": "halfnote.check", **fields, "messages": [message]})
    return body, {"content-type": "application/json", **headers(secrets, f"chk_{id_}-1", body, now)}


async def _post(client: httpx.AsyncClient, url: str, left: Iterator[tuple[bytes, dict[str, str]]]) -> None:
    for body, sent in left:
        response = await client.post(url, content=body, headers=sent)
        response.raise_for_status()


async def _settle_all(dsn: str, ids: list[str]) -> float:
    """Put all transactions in doubt in one statement; return the seconds until each has its Op."""
    await fill_ours(dsn, ids)
    asked = as_uuids(ids)
    async with connected(dsn) as connection:
        started = perf_counter()
        await connection.execute(ALL_IN_DOUBT, asked)
        async with asyncio.timeout(LONGEST_S):
            while await connection.fetchval(SETTLED, asked) < len(ids):
                await asyncio.sleep(0.1)
        return perf_counter() - started
