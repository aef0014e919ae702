"""A model against the real store: producers, checks, operators, crashes and clock steps in any order.

What must hold after every step: one op a transaction; the outbox has exactly the messages of committed ones; offsets
become visible in order and a transaction's are consecutive; nothing acknowledged is missing or changed; policy never
decides a parked transaction; and each that it parks or rolls back is announced, or counted by an announcement.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from app.announcements import PARKED, ROLLED_BACK
from app.checkback.loop import CheckBack
from app.checkback.sweep import Sweeps
from app.config import Settings
from app.database.connection import Connection, connect
from app.egress.http_client import EgressClient
from app.egress.reply import Reply
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.loops import announce_held_back
from app.runtime.state import Runtime
from app.store.relay.announcements import GROUP
from app.verdicts import CheckBackState, Source, Verdict
from tests.conftest import client_of, migrated_template, register_group
from tests.support import postgres
from tests.support.examples import examples

ANSWERS = ["commit", "rollback", "unknown", "garbage", "no answer"]
BEGINS = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
CUT = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()
"""
CHECKS = "select transaction_id::text, number, outcome from attempt where kind = 'check'"
# Operational messages are recognized by their producer group.
HALVES = "select transaction_id, count(*) from half where producer_group = $1 group by 1"
OPS = """
select o.transaction_id, o.verdict, o.source from op o join half h using (transaction_id)
where h.position = 0 and h.producer_group = $1
"""
ANNOUNCED = """
select topic, sum(1 + (convert_from(body, 'utf8')::json ->> 'held_back')::int)
from half where topic = any($1) group by 1
"""
HELD_BACK = "select topic, sum(held_back) from announced group by 1"


class Shop(EgressClient):
    """A producer that answers without a network."""

    def __init__(self, answer: Callable[[bytes], Reply]) -> None:
        self._answer = answer

    async def call(self, url: str, body: bytes, *_: Any, **__: Any) -> Reply:
        """Return what `answer` makes of the body."""
        return self._answer(body)


class Halfnote(RuleBasedStateMachine):
    """One service over a database of its own; every rule drives it through HTTP or takes a loop's step."""

    transactions = Bundle("transactions")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.dsn = postgres.create_database(migrated_template())
        self.now = BEGINS
        self.halves: dict[str, dict[str, Any]] = {}
        self.verdicts: dict[str, str] = {}
        self.parked: set[str] = set()
        self.answers: dict[str, str] = {}
        self.needless_checks: list[str] = []
        self.sent_answers: dict[tuple[str, int], str] = {}
        self.cursor = 0
        self.seen = 0
        self._run(self._begin())

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _begin(self) -> None:
        self.db: Connection = await connect(self.dsn)
        await register_group(self.db, "shop", unanswered_park_s=120)
        await self._start()

    async def _start(self) -> None:
        self.stack = AsyncExitStack()
        configuration = Settings(_env_file=None, database_url=self.dsn, pool_size=3, linger_s=0)  # type: ignore[call-arg]
        self.runtime: Runtime = await assemble(configuration, self.dsn, self.stack)
        self.runtime.checks_http = Shop(self._answer)
        self.client = await self.stack.enter_async_context(client_of(self.runtime))
        self.runtime.clock.fixed = self.now
        self.checkback = CheckBack()
        self.sweeps = Sweeps(self.checkback.wake.set)

    def _answer(self, body: bytes) -> Reply:
        check = json.loads(body)
        if check["transaction_id"] in self.verdicts:
            self.needless_checks.append(check["transaction_id"])
        answer = self.answers.get(check["transaction_id"], "unknown")
        self.sent_answers[check["transaction_id"], check["check"]] = answer
        if answer == "no answer":
            return Reply(None, {}, b"", False, "unreachable", 0, unreachable=True)
        return Reply(
            200, {}, b"<html>" if answer == "garbage" else b'{"verdict": "%s"}' % answer.encode(), False, None, 0
        )

    @rule(target=transactions, count=st.integers(1, 3), max_checks=st.integers(1, 3), park=st.booleans())
    def half(self, count: int, max_checks: int, park: bool) -> Any:
        """A new half is acknowledged once, and its repeat with the same answer."""
        one = str(uuid7(self.now))
        request = {
            "producer_group": "shop",
            "transaction_id": one,
            "messages": [{"topic": "order", "body": n} for n in range(count)],
            "check": {"max_checks": max_checks, "on_exhausted": "park" if park else "rollback", "interval_s": 10},
        }
        first, again = (self._run(self.client.post("/half", json=request)) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == {**first.json(), "replayed": True}
        self.halves[one] = request
        return one

    @rule(one=transactions)
    def half_with_other_content(self, one: str) -> None:
        """The same id with other content is refused."""
        request = {**self.halves[one], "messages": [*self.halves[one]["messages"], {"topic": "order", "body": "more"}]}
        assert self._run(self.client.post("/half", json=request)).status_code == 409

    @rule(one=transactions, verdicts=st.lists(st.sampled_from(["commit", "rollback"]), min_size=1, max_size=4))
    def ends_at_once(self, one: str, verdicts: list[str]) -> None:
        """Ends that arrive at once all return the same verdict."""
        answers = self._run(self._together([self._end(one, verdict) for verdict in verdicts]))
        for verdict, answer in zip(verdicts, answers, strict=True):
            self._acknowledge(one, verdict, answer)

    @rule(target=transactions, counts=st.lists(st.integers(1, 3), min_size=2, max_size=6), data=st.data())
    def burst(self, counts: list[int], data: st.DataObject) -> Any:
        """New halves and their ends share flushes; each gets its own verdict."""
        new = [str(uuid7(self.now)) for _ in counts]
        verdicts = [data.draw(st.sampled_from(["commit", "commit", "rollback"])) for _ in counts]
        for one, count in zip(new, counts, strict=True):
            messages = [{"topic": "order", "body": n} for n in range(count)]
            self.halves[one] = {"producer_group": "shop", "transaction_id": one, "messages": messages}
        halves = self._run(self._together([self.client.post("/half", json=self.halves[one]) for one in new]))
        assert {half.status_code for half in halves} == {201}
        ends = self._run(self._together([self._end(one, verdict) for one, verdict in zip(new, verdicts, strict=True)]))
        for one, verdict, end in zip(new, verdicts, ends, strict=True):
            assert end.status_code == 200
            self._acknowledge(one, verdict, end)
        return multiple(*new)

    @rule(one=transactions, from_check=st.booleans())
    def unknown(self, one: str, from_check: bool) -> None:
        """`unknown` decides nothing."""
        answer = self._run(self._end(one, "unknown", from_check=from_check))
        assert answer.status_code == 202

    @rule(one=transactions, verdict=st.sampled_from(["commit", "rollback"]))
    def operator_decides(self, one: str, verdict: str) -> None:
        """An operator's verdict counts as any other: the first one stands."""
        request = {"verdict": verdict, "reason": "asked by phone", "force": True}
        answer = self._run(self.client.post(f"/transactions/{one}/verdict", json=request))
        self._acknowledge(one, verdict, answer)

    @rule(one=transactions, answer=st.sampled_from(ANSWERS))
    def producer_will_answer(self, one: str, answer: str) -> None:
        """Set what the check endpoint answers about a transaction from now on."""
        self.answers[one] = answer

    @rule(seconds=st.sampled_from([1, 7, 10, 31, 130, 600]))
    def time_passes(self, seconds: int) -> None:
        """Time passes; due transactions are swept, checked and settled."""
        self._set_clock(self.now + timedelta(seconds=seconds))
        self._run(self._check())

    @rule(seconds=st.sampled_from([-3600, -5, 5, 3600]))
    def clock_steps(self, seconds: int) -> None:
        """The database's clock steps; nothing that was acknowledged changes."""
        self._set_clock(
            min(max(self.now + timedelta(seconds=seconds), BEGINS - timedelta(hours=6)), BEGINS + timedelta(hours=6))
        )

    @rule(target=transactions, ending=st.lists(transactions, max_size=4), delay=st.sampled_from([0, 0.001, 0.004]))
    def crash(self, ending: list[str], delay: float) -> Any:
        """Every connection is cut during halves and ends; a new process continues with what was stored."""
        return multiple(*self._run(self._crash(ending, delay)))

    async def _crash(self, ending: list[str], delay: float) -> list[str]:
        new = [str(uuid7(self.now)) for _ in range(3)]
        halves = [
            {"producer_group": "shop", "transaction_id": one, "messages": [{"topic": "order", "body": 1}]}
            for one in new
        ]
        requests = [
            *(asyncio.ensure_future(self.client.post("/half", json=half)) for half in halves),
            *(asyncio.ensure_future(self._end(one, "commit")) for one in ending),
        ]
        await asyncio.sleep(delay)
        await self.db.execute(CUT)
        answers = await asyncio.gather(*requests)
        await self.stack.aclose()
        await self._start()
        for one, half, answer in zip(new, halves, answers[:3], strict=True):
            assert answer.status_code in (201, 503)
            # Repeating a request with an unknown outcome is safe, and returns the outcome.
            again = await self.client.post("/half", json=half)
            assert again.status_code == (200 if answer.status_code == 201 else again.status_code)
            assert again.status_code in (200, 201)
            self.halves[one] = half
        for one, answer in zip(ending, answers[3:], strict=True):
            if answer.status_code != 503:
                self._acknowledge(one, "commit", answer)
        return new

    async def _together(self, work: list[Any]) -> list[Any]:
        return await asyncio.gather(*work)

    def _end(self, one: str, verdict: str, **fields: Any) -> Any:
        return self.client.post(
            "/end", json={"transaction_id": one, "producer_group": "shop", "verdict": verdict, **fields}
        )

    def _acknowledge(self, one: str, verdict: str, answer: httpx.Response) -> None:
        assert answer.status_code in (200, 409), answer.text
        recorded = verdict if answer.status_code == 200 else answer.json()["recorded"]["verdict"]
        assert self.verdicts.setdefault(one, recorded) == recorded

    def _set_clock(self, now: datetime) -> None:
        self.now = self.runtime.clock.fixed = now

    async def _check(self) -> None:
        await self.sweeps.step(self.runtime, self.now)
        await self.checkback.step(self.runtime, self.now)
        await self.checkback.settle_all()
        await announce_held_back.step(self.runtime, self.now)
        parked = "select transaction_id::text from check_back where state = $1"
        self.parked |= {row[0] for row in await self.db.fetch(parked, CheckBackState.PARKED)}
        for one, check, outcome in await self.db.fetch(CHECKS):
            # The outcome of a check is its producer's answer, unless another verdict was recorded before.
            answered = self.sent_answers[one, check]
            assert outcome in (answered if answered in ("commit", "rollback", "unknown") else "unanswered", "lost")
        for one, verdict, _ in await self.db.fetch(OPS, "shop"):
            # The verdict of a check or of policy must not change, as if it had been acknowledged.
            assert self.verdicts.setdefault(str(one), Verdict(verdict).word) == Verdict(verdict).word

    @invariant()
    def everything_agrees(self) -> None:
        """The tables have what was acknowledged, and nothing else."""
        self._run(self._agree())

    async def _agree(self) -> None:
        stored = {str(row[0]): row[1] for row in await self.db.fetch(HALVES, "shop")}
        assert stored == {one: len(half["messages"]) for one, half in self.halves.items()}
        ops = {str(row[0]): (Verdict(row[1]).word, row[2]) for row in await self.db.fetch(OPS, "shop")}
        assert self.needless_checks == [], "a decided transaction was asked about"
        for one, verdict in self.verdicts.items():
            assert ops[one][0] == verdict
        assert not [one for one in self.parked if one in ops and ops[one][1] == Source.POLICY]
        rows = await self.db.fetch('select "offset", transaction_id, position from outbox order by 1')
        published: dict[str, list[tuple[int, int]]] = {}
        for offset, one, position in rows:
            published.setdefault(str(one), []).append((offset, position))
        own = {str(row[0]): row[1] for row in await self.db.fetch(HALVES, GROUP)}
        assert set(published) == {one for one, (verdict, _) in ops.items() if verdict == "commit"} | set(own)
        for one, places in published.items():
            first = places[0][0]
            assert places == [(first + n, n) for n in range((stored | own)[one])]
        await self._agree_on_announcements(sum(source == Source.POLICY for _, source in ops.values()))
        assert sum(offset <= self.cursor for offset, *_ in rows) == self.seen, "an offset appeared behind a reader"
        self.cursor, self.seen = (rows[-1][0] if rows else 0), len(rows)

    async def _agree_on_announcements(self, rolled_back: int) -> None:
        """Each act of policy is announced, or counted by an announcement that was or will be made, exactly once."""
        parked = await self.db.fetchval("select count(*) from attempt where kind = 'parked'")
        counts = Counter({PARKED: 0, ROLLED_BACK: 0})
        for topic, count in [*await self.db.fetch(ANNOUNCED, [*counts]), *await self.db.fetch(HELD_BACK)]:
            counts[topic] += count
        assert counts == {PARKED: parked, ROLLED_BACK: rolled_back}

    def teardown(self) -> None:
        self._run(self.stack.aclose())
        self._run(self.db.close())
        self._run(self.loop.shutdown_asyncgens())
        self.loop.close()
        postgres.drop_database(self.dsn)


QUICK = settings(
    max_examples=examples(12),
    stateful_step_count=30,
    deadline=None,
    # Each run has the same steps, so a new failure has its cause in the change.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class TestModel(Halfnote.TestCase):
    settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestModelAtLength(Halfnote.TestCase):
    settings = settings(QUICK, max_examples=120)
