"""Acts on a subscription: edit, reset the breaker, pause, resume, test, rotate the secret, replay."""

from dataclasses import replace
from typing import Any

from app.console.acts.act import CONFIRMED, Confirm, ConsoleAct, Done, FormField, Preview, note_of, number_or_text
from app.console.acts.rotation import overlap_of, seen_by, with_state
from app.console.acts.subscription_edit import EDIT
from app.console.rendering import command, duration, link, number, state
from app.console.visit import Visit
from app.routers.replays import preview_replay, start_replay
from app.routers.subscription_actions import (
    post_pause,
    post_reset_breaker,
    post_resume,
    post_test,
    rotate_seen_secret,
    secret_state,
)
from app.routers.subscriptions import get_subscription
from app.schemas.replays import ReplayRequest
from app.schemas.validation import checked

_PATH = "/console/subscriptions/{name}/do"


def _back(visit: Visit) -> str:
    return link("subscriptions", visit.path["name"])


async def _preview(
    visit: Visit, effect: str, act: str, fields: tuple[FormField, ...] = (), *, possible: set[str] | None = None
) -> Preview:
    shown = await get_subscription(visit.path["name"], visit.runtime, visit.caller)
    lag = f"{number(shown.lag.messages)} messages, {duration(shown.lag.seconds)}"
    facts: list[tuple[str, Any]] = [
        ("subscription", shown.name),
        ("state", state(shown.state)),
        ("topics", ", ".join(shown.topics)),
        ("lag", lag),
        ("dead letters", number(shown.dead_letters)),
    ]
    back = link("subscriptions", shown.name)
    said = command("subscriptions", act, shown.name)
    allowed = possible is None or shown.state in possible
    return Preview(shown.name, back, facts, effect, said, fields=fields, is_possible=allowed)


async def _pause_preview(visit: Visit) -> Preview:
    effect = "Deliveries stop until the subscription is resumed. Messages wait in the log; nothing is lost."
    return await _preview(visit, effect, "pause", possible={"active", "open"})


async def _pause(visit: Visit, reason: str) -> Done:
    await post_pause(visit.path["name"], visit.runtime, visit.caller, note_of(reason))
    return Done("The subscription is paused.", _back(visit))


async def _resume_preview(visit: Visit) -> Preview:
    effect = "Deliveries continue from the checkpoint."
    return await _preview(visit, effect, "resume", possible={"paused", "disabled"})


async def _resume(visit: Visit, reason: str) -> Done:
    await post_resume(visit.path["name"], visit.runtime, visit.caller, note_of(reason))
    return Done("The subscription is active.", _back(visit))


async def _test_preview(visit: Visit) -> Preview:
    effect = "One message of the topic `halfnote.test` goes to the destination now. Its answer changes nothing here."
    return await _preview(visit, effect, "test")


async def _test(visit: Visit, reason: str) -> Done:
    found = await post_test(visit.path["name"], visit.runtime, visit.caller, note_of(reason))
    results: list[tuple[str, Any]] = [("outcome", found.outcome), ("status", found.status)]
    results += [("took", f"{found.duration_ms} ms"), ("error", found.error), ("answer", found.response)]
    said = "The destination took the test message." if found.outcome == "delivered" else "The test message failed."
    return Done(said, _back(visit), results=[row for row in results if row[1] is not None])


async def _rotate_preview(visit: Visit) -> Preview:
    effect = "A new secret is made and shown once. For 24 hours the former secret signs as well."
    state_seen = await secret_state(visit.path["name"], visit.runtime, visit.caller)
    return with_state(await _preview(visit, effect, "rotate-secret"), state_seen)


async def _rotate(visit: Visit, reason: str) -> Done:
    name, note = visit.path["name"], note_of(reason)
    made = await rotate_seen_secret(name, visit.runtime, visit.caller, note, seen=seen_by(visit))
    back = _back(visit)
    return Done("The new secret signs now.", back, secret=made.secret, results=overlap_of(made))


async def _replay_preview(visit: Visit) -> Preview:
    effect = "The matching messages of this part of the log are sent again, with the same ids, beside live delivery."
    since = FormField("since", "From the time or offset", value=visit.form.get("since", ""), hint=_SINCE)
    until = FormField("until", "Until the time or offset", value=visit.form.get("until", ""), hint="empty: now")
    return await _preview(visit, effect, "replay", (since, until))


# The form had no end, so another replay without one has the same messages, although each end was counted.
_TO_NEWEST = "to_newest"
_SINCE = "2026-11-21T08:00:00Z, or an offset, or empty for the oldest"


async def _replay(visit: Visit, reason: str) -> Done | Confirm:
    asked: dict[str, Any] = {"reason": reason, "from": _place(visit.form.get("since", "")) or "earliest"}
    if until := _place(visit.form.get("until", "")):
        asked["until"] = until
    name, wanted = visit.path["name"], checked(ReplayRequest, asked)
    if visit.form.get(CONFIRMED) != "yes":
        found = await preview_replay(name, wanted, visit.runtime, visit.caller)
        if wanted.until is None:
            visit.form[_TO_NEWEST] = "yes"
        # What is committed after this count is not sent.
        visit.form["until"] = str(found.until)
        count = f"{'' if found.exact else 'at least '}{number(found.messages)}"
        return Confirm([("offsets", f"{number(found.after + 1)} to {number(found.until)}"), ("messages", count)])
    to_newest = visit.form.get(_TO_NEWEST) == "yes"
    made = await start_replay(name, wanted, visit.runtime, visit.caller, to_newest=to_newest)
    said = f"Replay {made.replay_id} sends the offsets {number(made.after + 1)} to {number(made.until)}."
    return Done(said, _back(visit))


def _place(text: str) -> dict[str, Any] | None:
    text = text.strip()
    if not text:
        return None
    place = number_or_text(text)
    return {"offset": place} if isinstance(place, int) else {"time": place}


async def _reset_preview(visit: Visit) -> Preview:
    effect = (
        "The circuit breaker closes, and messages go out at full speed. If the destination still fails, it opens "
        "again; until then each failure uses up a try."
    )
    shown = await get_subscription(visit.path["name"], visit.runtime, visit.caller)
    found = await _preview(visit, effect, "reset-breaker")
    if shown.breaker.opened_at is not None:
        return replace(found, facts=[*found.facts, ("open because", shown.breaker.because)])
    return replace(found, is_possible=shown.breaker.paused_until is not None)


async def _reset(visit: Visit, reason: str) -> Done:
    await post_reset_breaker(visit.path["name"], visit.runtime, visit.caller, note_of(reason))
    return Done("The circuit breaker is closed.", _back(visit))


ACTS = [
    EDIT,
    ConsoleAct(
        f"{_PATH}/reset-breaker",
        "Reset breaker",
        ("POST", "/subscriptions/{name}/reset-breaker"),
        _reset_preview,
        _reset,
        "good",
    ),
    ConsoleAct(f"{_PATH}/pause", "Pause", ("POST", "/subscriptions/{name}/pause"), _pause_preview, _pause),
    ConsoleAct(f"{_PATH}/resume", "Resume", ("POST", "/subscriptions/{name}/resume"), _resume_preview, _resume, "good"),
    ConsoleAct(f"{_PATH}/test", "Test", ("POST", "/subscriptions/{name}/test"), _test_preview, _test),
    ConsoleAct(f"{_PATH}/replay", "Replay", ("POST", "/subscriptions/{name}/replay"), _replay_preview, _replay),
    ConsoleAct(
        f"{_PATH}/rotate-secret",
        "Rotate secret",
        ("POST", "/subscriptions/{name}/rotate-secret"),
        _rotate_preview,
        _rotate,
        "bad",
    ),
]
