"""Acts on dead letters: redeliver and drop, one by one or by a filter."""

from typing import Any

from app.console.acts.act import ConsoleAct, Done, Preview, number_or_text
from app.console.rendering import command, link
from app.console.visit import Visit
from app.routers.dead_letters import drop_dead_letters, redeliver_dead_letters
from app.schemas.dead_letters import ByFilter, ByIds, DeadLetterRef
from app.schemas.validation import checked

_FILTER = ("subscription", "topic", "key", "reason", "error", "died_after", "died_before")
_PATH = "/console/dead-letters/do"
_EFFECTS = {
    "redeliver": (
        "They are delivered again at once, with a full set of tries. One that fails again becomes a new dead letter."
    ),
    "drop": "They are dropped for good and never delivered to their subscription.",
}


def _selection(visit: Visit, reason: str, *, dry_run: bool) -> ByIds | ByFilter:
    asked = visit.asked
    if "message_id" in asked:
        one: dict[str, object] = {"subscription": asked.get("subscription"), "message_id": asked["message_id"]}
        if "replay" in asked:
            one["replay"] = number_or_text(asked["replay"])
        return checked(ByIds, {"ids": [one], "reason": reason})
    return checked(ByFilter, {"filter": _filter(visit), "dry_run": dry_run, "reason": reason})


def _filter(visit: Visit) -> dict[str, str]:
    return {name: visit.asked[name] for name in _FILTER if name in visit.asked}


def _back(visit: Visit) -> str:
    return link("dead-letters", **_filter(visit))


async def _run(visit: Visit, word: str, reason: str, *, dry_run: bool) -> tuple[int, int, list[DeadLetterRef]]:
    """Return how many left the table, how many still match, and the dead letters concerned."""
    wanted = _selection(visit, reason, dry_run=dry_run)
    if word == "drop":
        dropped = await drop_dead_letters(visit.runtime, visit.caller, wanted)
        return dropped.dropped, dropped.left, dropped.ids
    sent = await redeliver_dead_letters(visit.runtime, visit.caller, wanted)
    return sent.redelivered, sent.left, sent.ids


def _act(word: str, method: str, route: str, tone: str) -> ConsoleAct:
    async def preview(visit: Visit) -> Preview:
        asked = visit.asked
        facts: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in asked.items()]
        if "message_id" in asked:
            said = command("dead-letters", word, asked["message_id"], subscription=asked.get("subscription"))
            return Preview(asked["message_id"], _back(visit), facts, _EFFECTS[word], said)
        _, left, ids = await _run(visit, word, "preview", dry_run=True)
        facts.append(("dead letters", f"{left:,}"))
        options = {"because" if name == "reason" else name: value for name, value in _filter(visit).items()}
        said = f"{command('dead-letters', word, **options)} --yes"
        items = [(f"{one.subscription} · {one.message_id}", _of_message(one.message_id)) for one in ids[:50]]
        more = f"and {left - 50:,} more" if left > 50 else ""
        return Preview(
            f"{left:,} dead letters", _back(visit), facts, _EFFECTS[word], said, items, more, is_possible=left > 0
        )

    async def run(visit: Visit, reason: str) -> Done:
        count, left, _ = await _run(visit, word, reason, dry_run=False)
        done = "dropped" if word == "drop" else "redelivered"
        rest = f" {left:,} still match: repeat the act for the rest." if left else ""
        return Done(f"{count:,} dead letters are {done}.{rest}", back=_back(visit))

    return ConsoleAct(f"{_PATH}/{word}", word.capitalize(), (method, route), preview, run, tone)


def _of_message(message_id: str) -> str:
    return link("transactions", message_id.rpartition("-")[0])


ACTS = [
    _act("redeliver", "POST", "/dead-letters/redeliver", "good"),
    _act("drop", "DELETE", "/dead-letters", "bad"),
]
