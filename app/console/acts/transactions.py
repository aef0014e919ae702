"""Acts on transactions: check now, a person's verdict, reissue; one by one or by a filter."""

from typing import Any

from app.console.acts.act import ConsoleAct, Done, FormField, Preview, note_of, number_or_text
from app.console.rendering import command, exact, link, state
from app.console.visit import Visit
from app.errors import Invalid
from app.routers.operator_verdicts import (
    CheckMany,
    DecideMany,
    VerdictRequest,
    check_transaction,
    check_transactions,
    decide_transaction,
    decide_transactions,
)
from app.routers.reissues import ReissueMany, ReissueRequest, reissue_transaction, reissue_transactions
from app.routers.transaction_replays import TransactionReplay, replay_transaction
from app.routers.transactions import get_transaction
from app.schemas.fields import ActNote
from app.schemas.transactions import Matched, TransactionShown
from app.schemas.validation import checked
from app.verdicts import State

_ONE = "/console/transactions/{transaction_id:uuid}/do"
_MANY = "/console/transactions/do"
_ID = "{transaction_id:uuid}"
_UNDECIDED = (State.HALF, State.IN_DOUBT, State.PARKED)
# The fields of a filter that the API's calls on many transactions have.
_FILTER = ("producer_group", "state", "born_after", "born_before")
# The field of a form that holds the transactions of the preview.
_IDS = "transaction_ids"

_ASKS = (
    "A worker asks the producer's check URL as soon as one is free. A parked transaction stays parked unless the "
    "answer is a verdict."
)
_COMMITS = (
    "The verdict commit is recorded for good, and the messages are delivered to every subscription that takes them."
)
_ROLLS_BACK = (
    "The verdict rollback is recorded for good. The messages are never delivered, unless a person reissues them."
)
_REISSUES = (
    "The same messages are committed as a new transaction and delivered. The old verdict stands. A transaction is "
    "reissued at most once."
)
_REISSUES_ALL = (
    "The messages of each are committed as a new transaction and delivered. The old verdicts stand. Those that were "
    "reissued before are left out."
)
_REPLAYS = (
    "The subscription gets the messages that it takes once more, with the same ids, beside its live delivery. One that "
    "it has got is delivered again."
)


def _back(visit: Visit) -> str:
    return link("transactions", visit.path["transaction_id"])


async def _shown(visit: Visit) -> TransactionShown:
    return await get_transaction(visit.runtime, visit.caller, visit.path["transaction_id"])


def _preview(
    shown: TransactionShown, effect: str, said: str, *, possible: bool, fields: tuple[FormField, ...] = ()
) -> Preview:
    messages = [f"{one.topic}{f' · {one.key}' if one.key else ''}" for one in shown.messages]
    facts: list[tuple[str, Any]] = [
        ("transaction", str(shown.transaction_id)),
        ("producer group", shown.producer_group),
        ("state", state(shown.state)),
        ("messages", f"{len(messages)}: {', '.join(messages[:5])}{' …' if len(messages) > 5 else ''}"),
    ]
    back = link("transactions", shown.transaction_id)
    return Preview(str(shown.transaction_id), back, facts, effect, said, fields=fields, is_possible=possible)


async def _check_preview(visit: Visit) -> Preview:
    shown = await _shown(visit)
    said = command("transactions", "check", str(shown.transaction_id))
    return _preview(shown, _ASKS, said, possible=shown.state in _UNDECIDED)


async def _check(visit: Visit, reason: str) -> Done:
    asked = await check_transaction(visit.runtime, visit.caller, visit.path["transaction_id"], note_of(reason))
    if asked.held_until is None:
        return Done("The check is due now.", _back(visit))
    return Done(f"The producer group asked for no checks until {exact(asked.held_until)}.", _back(visit))


def _verdict(word: str, effect: str, tone: str) -> ConsoleAct:
    async def preview(visit: Visit) -> Preview:
        shown = await _shown(visit)
        said = command("transactions", "verdict", word, str(shown.transaction_id), reason="…")
        force = FormField("force", "Decide it although its producer may still be working", "checkbox")
        fields = (force,) if shown.state is State.HALF else ()
        return _preview(shown, effect, said, possible=shown.state in _UNDECIDED, fields=fields)

    async def run(visit: Visit, reason: str) -> Done:
        asked = {"verdict": word, "reason": reason, "force": visit.form.get("force") == "on"}
        wanted = checked(VerdictRequest, asked)
        await decide_transaction(visit.runtime, visit.caller, visit.path["transaction_id"], wanted)
        return Done(f"The verdict {word} is recorded.", _back(visit))

    return ConsoleAct(f"{_ONE}/{word}", word.capitalize(), ("POST", f"/transactions/{_ID}/verdict"), preview, run, tone)


async def _reissue_preview(visit: Visit) -> Preview:
    shown = await _shown(visit)
    said = command("transactions", "reissue", str(shown.transaction_id), reason="…")
    possible = shown.state is State.ROLLED_BACK and shown.reissued_as is None
    return _preview(shown, _REISSUES, said, possible=possible)


async def _reissue(visit: Visit, reason: str) -> Done:
    wanted = ReissueRequest(reason=reason)
    made = await reissue_transaction(visit.runtime, visit.caller, visit.path["transaction_id"], wanted)
    return Done(f"The messages are committed as {made.transaction_id}.", back=link("transactions", made.transaction_id))


async def _replay_preview(visit: Visit) -> Preview:
    shown, name = await _shown(visit), visit.asked.get("subscription", "")
    position = visit.asked.get("position")
    said = command(
        "transactions", "replay", str(shown.transaction_id), subscription=name, position=position, reason="…"
    )
    found = _preview(shown, _REPLAYS, said, possible=shown.state is State.COMMITTED)
    found.facts.append(("subscription", name))
    if position is not None:
        found.facts.append(("position", position))
    return found


async def _replay(visit: Visit, reason: str) -> Done:
    asked: dict[str, Any] = {"subscription": visit.asked.get("subscription", ""), "reason": reason}
    if (position := visit.asked.get("position")) is not None:
        asked["position"] = number_or_text(position)
    wanted = checked(TransactionReplay, asked)
    made = await replay_transaction(visit.runtime, visit.caller, visit.path["transaction_id"], wanted)
    return Done(
        f"Replay {made.replay_id} sends it to {made.subscription}.", back=link("subscriptions", made.subscription)
    )


def _filter(visit: Visit) -> dict[str, Any]:
    return dict(visit.filter_of(_FILTER))


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """Return a filter as the options of the command line."""
    return {"group" if name == "producer_group" else name: value for name, value in asked.items()}


def _shown_ids(visit: Visit) -> dict[str, Any]:
    """Return the transactions that the preview named. Raises Invalid if the form names none.

    What matches the filter only since then was not seen by the person, so the act leaves it out.
    """
    ids = visit.form.get(_IDS, "").split()
    if not ids:
        raise Invalid("The form names no transactions. Load the page again and repeat the act.", field=_IDS)
    return {_IDS: ids}


def _unchanged(visit: Visit, changed: int) -> str:
    """Return a sentence about transactions that the preview named and the act left as they are."""
    left = len(visit.form[_IDS].split()) - changed
    if not left:
        return ""
    return f" {left} of those shown no longer matched, and {'is' if left == 1 else 'are'} as before."


def _many_preview(visit: Visit, matched: Matched, effect: str, said: str) -> Preview:
    asked = _filter(visit)
    facts: list[tuple[str, Any]] = [(name.replace("_", " "), value) for name, value in asked.items()]
    facts.append(("transactions", _count_of(matched)))
    items = [(str(one), link("transactions", one)) for one in matched.transaction_ids[:50]]
    more = f"and {matched.matched - 50} more" if matched.matched > 50 else ""
    return Preview(
        f"{matched.matched} transactions",
        link("transactions", **asked),
        facts,
        effect,
        said,
        items,
        more,
        (FormField(_IDS, "", "hidden", " ".join(map(str, matched.transaction_ids))),),
        is_possible=matched.matched > 0,
    )


def _count_of(matched: Matched) -> str:
    if not matched.more:
        return str(matched.matched)
    if matched.matched:
        return f"{matched.matched} or more: repeat the act for the rest"
    return "none among the newest: filter by times of birth to look at older ones"


async def _check_many_preview(visit: Visit) -> Preview:
    asked = _filter(visit)
    matched = await check_transactions(visit.runtime, visit.caller, checked(CheckMany, asked), ActNote())
    said = command("transactions", "check", **_options(asked))
    return _many_preview(visit, matched, "Their checks become due at once.", f"{said} --no-dry-run")


async def _check_many(visit: Visit, reason: str) -> Done:
    wanted = checked(CheckMany, {**_filter(visit), **_shown_ids(visit), "dry_run": False})
    done = await check_transactions(visit.runtime, visit.caller, wanted, note_of(reason))
    said = f"{done.changed} checks are due now.{_unchanged(visit, done.changed)}"
    return Done(said, back=link("transactions", **_filter(visit)))


def _verdict_many(word: str, tone: str) -> ConsoleAct:
    async def preview(visit: Visit) -> Preview:
        asked = {**_filter(visit), "verdict": word, "reason": "preview"}
        matched = await decide_transactions(visit.runtime, visit.caller, checked(DecideMany, asked))
        said = command("transactions", "verdict", word, **_options(_filter(visit)), reason="…")
        effect = f"Each gets the verdict {word}, which is final. Transactions that are decided meanwhile do not change."
        return _many_preview(visit, matched, effect, f"{said} --no-dry-run")

    async def run(visit: Visit, reason: str) -> Done:
        asked = {**_filter(visit), **_shown_ids(visit), "verdict": word, "reason": reason, "dry_run": False}
        done = await decide_transactions(visit.runtime, visit.caller, checked(DecideMany, asked))
        said = f"{done.changed} transactions are decided: {word}.{_unchanged(visit, done.changed)}"
        return Done(said, back=link("transactions", **_filter(visit)))

    label = f"{word.capitalize()} all"
    return ConsoleAct(f"{_MANY}/{word}", label, ("POST", "/transactions/verdict"), preview, run, tone)


def _reissued_filter(visit: Visit) -> dict[str, Any]:
    if visit.asked.get("state", State.ROLLED_BACK) != State.ROLLED_BACK:
        raise Invalid("`state` must be rolled_back: only such transactions are reissued.", field="state")
    return {name: value for name, value in _filter(visit).items() if name != "state"}


async def _reissue_many_preview(visit: Visit) -> Preview:
    asked = _reissued_filter(visit)
    wanted = checked(ReissueMany, {**asked, "reason": "preview"})
    matched = await reissue_transactions(visit.runtime, visit.caller, wanted)
    said = command("transactions", "reissue", **_options(asked), reason="…")
    return _many_preview(visit, matched, _REISSUES_ALL, f"{said} --no-dry-run")


async def _reissue_many(visit: Visit, reason: str) -> Done:
    asked = {**_reissued_filter(visit), **_shown_ids(visit), "reason": reason, "dry_run": False}
    done = await reissue_transactions(visit.runtime, visit.caller, checked(ReissueMany, asked))
    said = f"{done.changed} transactions are reissued.{_unchanged(visit, done.changed)}"
    return Done(said, back=link("transactions", **_filter(visit)))


ACTS = [
    ConsoleAct(f"{_MANY}/check", "Check all now", ("POST", "/transactions/check"), _check_many_preview, _check_many),
    _verdict_many("commit", "good"),
    _verdict_many("rollback", "bad"),
    ConsoleAct(
        f"{_MANY}/reissue",
        "Reissue all",
        ("POST", "/transactions/reissue"),
        _reissue_many_preview,
        _reissue_many,
    ),
    ConsoleAct(f"{_ONE}/check", "Check now", ("POST", f"/transactions/{_ID}/check"), _check_preview, _check),
    _verdict("commit", _COMMITS, "good"),
    _verdict("rollback", _ROLLS_BACK, "bad"),
    ConsoleAct(f"{_ONE}/replay", "Send again", ("POST", f"/transactions/{_ID}/replay"), _replay_preview, _replay),
    ConsoleAct(f"{_ONE}/reissue", "Reissue", ("POST", f"/transactions/{_ID}/reissue"), _reissue_preview, _reissue),
]
