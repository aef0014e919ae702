"""A log that is forgotten while an answer about it is on its way, as by a promotion."""

from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from app.database.connection import Connection
from app.relay import loop
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Responder
from tests.support.relay_stepping import offsets, order, publish, subscribe, turn_until


@pytest.mark.parametrize("answer", ["_read", "log_head"])
async def test_an_answer_from_before_says_nothing_of_the_log(
    answer: str,
    client: httpx.AsyncClient,
    runtime: Runtime,
    group: str,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay, forgets, asked = Relay(runtime), [], getattr(loop, answer)

    async def forgotten_meanwhile(*arguments: Any) -> Any:
        found = await asked(*arguments)
        # The first answer that has the message.
        if not forgets and (found[0] if answer == "log_head" else found.reached):
            forgets.append(relay.forget())
        return found

    monkeypatch.setattr(loop, answer, forgotten_meanwhile)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        # Of another process: the relay finds it in the log.
        runtime.publications.relay = None
        sent = await publish(client, order(1030))
        with capture_logs() as logs:
            runtime.clock.offset_s += 1
            await turn_until(relay, runtime, lambda: forgets)
            assert relay._head == 0
            runtime.clock.offset_s += 1
            await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        await relay.drain(runtime)
    assert forgets
    assert [one["event"] for one in logs if one["event"] == "log_forgotten"] == ["log_forgotten"]
    assert set(offsets(receiver)) == set(sent)
