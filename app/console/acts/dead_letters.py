"""Acts on dead letters: redeliver and drop, one by one or by a filter."""

from typing import Any

from app.console.acts.act import ConsoleAct, Done, FormField, Preview, number_or_text
from app.console.rendering import command, link
from app.console.visit import Visit
from app.errors import Invalid
from app.routers.dead_letters import drop_dead_letters, redeliver_dead_letters
from app.schemas.dead_letters import ByFilter, ByIds, DeadLetterRef, DropAnswer, RedeliverAnswer
from app.schemas.validation import checked

_FILTER = ("subscription", "topic", "key", "reason", "error", "died_after", "died_before")
_ID = ("subscription", "message_id", "replay")
# The dead letters of one act.
AT_ONCE = 1000
_PATH = "/console/dead-letters/do"
# The field of a form that holds the dead letters of the preview.
_SHOWN = "dead_letters"
_EFFECTS = {
    "redeliver": (
        "They are delivered again at once, with a full set of tries. One that fails again becomes a new dead letter."
    ),
    "drop": "They are dropped for good and never delivered to their subscription.",
}


def _by_id(visit: Visit, reason: str) -> ByIds:
    asked = visit.filter_of(_ID)
    one: dict[str, object] = {"subscription": asked.get("subscription"), "message_id": asked["message_id"]}
    if "replay" in asked:
        one["replay"] = number_or_text(asked["replay"])
    return checked(ByIds, {"ids": [one], "reason": reason})


def _filter(visit: Visit) -> dict[str, str]:
    return visit.filter_of(_FILTER)


def _back(visit: Visit) -> str:
    return link("dead-letters", **{name: visit.asked[name] for name in _FILTER if name in visit.asked})


async def _run(visit: Visit, word: str, wanted: ByIds | ByFilter) -> tuple[int, DropAnswer | RedeliverAnswer]:
    """Return how many left the table, and the answer of the API."""
    if word == "drop":
        dropped = await drop_dead_letters(visit.runtime, visit.caller, wanted)
        return dropped.dropped, dropped
    sent = await redeliver_dead_letters(visit.runtime, visit.caller, wanted)
    return sent.redelivered, sent


async def _would(visit: Visit, word: str, chosen: dict[str, str], at_most: int) -> DropAnswer | RedeliverAnswer:
    return (await _run(visit, word, checked(ByFilter, {"filter": chosen, "at_most": at_most})))[1]


async def _run_as_shown(visit: Visit, word: str, reason: str) -> tuple[int, str]:
    """Act on those that the preview named. Return how many, and what the person should know beside it.

    What matches the filter only since then was not seen by the person, so the act leaves it out; also one that a worker
    stored late, with an earlier time of death. Raises Invalid if the form names none, or for another filter.
    """
    _filter(visit)
    ids = [_named(one) for one in visit.form.get(_SHOWN, "").split()]
    if not ids:
        raise Invalid("The form names no dead letters. Load the page again and repeat the act.", field=_SHOWN)
    wanted = {"ids": ids, "died_before": visit.form.get("died_before", ""), "reason": reason}
    count, _ = await _run(visit, word, checked(ByIds, wanted))
    said = " More matched than were shown: repeat the act for the rest." if visit.form.get("more") else ""
    if gone := len(ids) - count:
        said += f" {gone:,} of those shown had been redelivered or dropped before."
    return count, said


def _name_of(one: DeadLetterRef) -> str:
    return f"{one.subscription}/{one.message_id}/{one.replay or 0}"


def _named(name: str) -> dict[str, object]:
    subscription, _, rest = name.partition("/")
    message_id, _, replay = rest.partition("/")
    return {"subscription": subscription, "message_id": message_id, "replay": number_or_text(replay)}


def _count_of(found: DropAnswer | RedeliverAnswer) -> str:
    count = f"{found.left:,}{'' if found.left_exact else ' or more'}"
    return f"{count}; the newest {len(found.ids):,} at once" if found.left > len(found.ids) else count


def _act(word: str, method: str, route: str, tone: str) -> ConsoleAct:
    async def preview(visit: Visit) -> Preview:
        asked = visit.filter_of(_ID if "message_id" in visit.asked else _FILTER)
        facts: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in asked.items()]
        if "message_id" in asked:
            of_one = {name: asked.get(name) for name in ("subscription", "replay")}
            said = command("dead-letters", word, asked["message_id"], **of_one)
            return Preview(asked["message_id"], _back(visit), facts, _EFFECTS[word], said)
        found = await _would(visit, word, _filter(visit), AT_ONCE)
        left = found.left
        facts.append(("dead letters", _count_of(found)))
        options = {"because" if name == "reason" else name: value for name, value in _filter(visit).items()}
        said = f"{command('dead-letters', word, **options)} --yes"
        items = [(f"{one.subscription} · {one.message_id}", _of_message(one.message_id)) for one in found.ids[:50]]
        more = f"and {left - 50:,} more" if left > 50 else ""
        assert found.died_before is not None  # a dry run has it
        # One that is redelivered and dies again while the person reads was not shown.
        fields = (
            FormField("died_before", "", "hidden", found.died_before.isoformat()),
            FormField(_SHOWN, "", "hidden", " ".join(map(_name_of, found.ids))),
            FormField("more", "", "hidden", "yes" if left > len(found.ids) or not found.left_exact else ""),
        )
        return Preview(
            f"{left:,} dead letters",
            _back(visit),
            facts,
            _EFFECTS[word],
            said,
            items,
            more,
            fields,
            is_possible=bool(found.ids),
        )

    async def run(visit: Visit, reason: str) -> Done:
        if "message_id" in visit.asked:
            count, rest = (await _run(visit, word, _by_id(visit, reason)))[0], ""
        else:
            count, rest = await _run_as_shown(visit, word, reason)
        done = "dropped" if word == "drop" else "redelivered"
        return Done(f"{count:,} dead letters are {done}.{rest}", back=_back(visit))

    return ConsoleAct(f"{_PATH}/{word}", word.capitalize(), (method, route), preview, run, tone)


def _of_message(message_id: str) -> str:
    return link("transactions", message_id.rpartition("-")[0])


ACTS = [
    _act("redeliver", "POST", "/dead-letters/redeliver", "good"),
    _act("drop", "DELETE", "/dead-letters", "bad"),
]
