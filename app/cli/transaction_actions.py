"""`halfnote transactions check | verdict | reissue | replay`: act on transactions."""

import sys
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.confirmation import Yes, must_agree
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.given_options import given
from app.cli.tables import moment
from app.cli.transaction_ids import transaction_id_of

TransactionId = Annotated[str, typer.Argument(metavar="TRANSACTION_ID")]
OneOrMany = Annotated[str | None, typer.Argument(metavar="TRANSACTION_ID", help="or --group and --state")]
VerdictWord = Annotated[str, typer.Argument(metavar="commit|rollback")]
Reason = Annotated[str, typer.Option(help="why; stored with the record")]
Actor = Annotated[str | None, typer.Option(envvar="USER", help="the person who decides, for the record")]
Group = Annotated[str | None, typer.Option(help="all of this producer group")]
StateName = Annotated[str | None, typer.Option(help="all in this state: in_doubt or parked")]
BornAfter = Annotated[str | None, typer.Option(help="born at this time or later (RFC 3339)")]
BornBefore = Annotated[str | None, typer.Option(help="born before this time (RFC 3339)")]
Limit = Annotated[int, typer.Option(help="the most to act on, newest first")]
DryRun = Annotated[bool, typer.Option(help="with a filter: only list what would change")]
# The options of a filter, as parameters.
OF_FILTER = ("group", "state", "born_after", "born_before", "limit")


def install(app: typer.Typer) -> None:
    """Add the commands to `halfnote transactions`."""
    app.command("check")(check)
    app.command("verdict")(verdict)
    app.command("reissue")(reissue)
    app.command("replay")(replay)


def check(
    context: typer.Context,
    transaction_id: OneOrMany = None,
    group: Group = None,
    state: StateName = None,
    born_after: BornAfter = None,
    born_before: BornBefore = None,
    limit: Limit = 100,
    dry_run: DryRun = True,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Check one transaction now, or all that match a filter: Halfnote asks the producer."""
    if transaction_id is not None:
        _refuse_filter(context)
        answer = call(url, "POST", path_of("transactions", transaction_id_of(transaction_id), "check"), as_json=as_json)
        print_json(answer) if as_json else print(_asked(answer))
        return
    many = filtered(group, state, born_after, born_before, limit, dry_run)
    _print_answer(call(url, "POST", "/transactions/check", content=many, as_json=as_json), "asked about", as_json)


def verdict(
    context: typer.Context,
    verdict: VerdictWord,
    reason: Reason,
    transaction_id: OneOrMany = None,
    actor: Actor = None,
    force: Annotated[bool, typer.Option("--force", help="decide although the producer may still be working")] = False,
    group: Group = None,
    state: StateName = None,
    born_after: BornAfter = None,
    born_before: BornBefore = None,
    limit: Limit = 100,
    dry_run: DryRun = True,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Decide one transaction, or all that match a filter. A verdict is final.

    With a filter and --no-dry-run, this lists the transactions, asks, and decides these and no others.
    """
    decision = {"verdict": verdict, "reason": reason, **_given(actor=actor)}
    if transaction_id is not None:
        _refuse_filter(context)
        content = {**decision, "force": force}
        answer = call(
            url,
            "POST",
            path_of("transactions", transaction_id_of(transaction_id), "verdict"),
            content=content,
            as_json=as_json,
        )
        stood = " It was recorded before." if not as_json and answer["replayed"] else ""
        print_json(answer) if as_json else print(f"Recorded: {verdict}, for good.{stood}")
        return
    if force:
        raise Refusal("--force is for one transaction, not for a filter.", code=2)
    many = {**filtered(group, state, born_after, born_before, limit, dry_run), **decision}
    question = f"{{count}} transactions will get the verdict {verdict}, for good. Go on?"
    _act(url, "/transactions/verdict", many, ("decided", question), yes=yes, as_json=as_json)


def reissue(
    context: typer.Context,
    reason: Reason,
    transaction_id: Annotated[str | None, typer.Argument(metavar="TRANSACTION_ID", help="or --group")] = None,
    actor: Actor = None,
    group: Annotated[str | None, typer.Option(help="all rolled-back ones of this producer group")] = None,
    born_after: BornAfter = None,
    born_before: BornBefore = None,
    limit: Limit = 100,
    dry_run: DryRun = True,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Send the messages of a rolled-back transaction, or of all that match a filter, as new, committed transactions.

    The old verdict stays. Transactions that were reissued before are left out of a filter. With a filter and
    --no-dry-run, this lists the transactions, asks, and reissues these and no others.
    """
    why = {"reason": reason, **_given(actor=actor)}
    if transaction_id is None:
        if group is None:
            raise Refusal("Name a TRANSACTION_ID, or a filter by --group.", code=2)
        times = _given(born_after=born_after, born_before=born_before)
        many = {"producer_group": group, "limit": limit, "dry_run": dry_run, **times, **why}
        question = "{count} transactions will be reissued and committed. Go on?"
        _act(url, "/transactions/reissue", many, ("reissued", question), yes=yes, as_json=as_json)
        return
    _refuse_filter(context)
    path = path_of("transactions", transaction_id_of(transaction_id), "reissue")
    answer = call(url, "POST", path, content=why, as_json=as_json)
    if as_json:
        print_json(answer)
        return
    offsets = ", ".join(str(message["offset"]) for message in answer["messages"])
    print(f"Reissued and committed as {answer['transaction_id']}, offset {offsets}.")


def replay(
    transaction_id: TransactionId,
    subscription: Annotated[str, typer.Option(help="the subscription that gets the messages again")],
    reason: Reason,
    position: Annotated[int | None, typer.Option(help="only the message at this position, from 0")] = None,
    actor: Actor = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Send a committed transaction's messages to one subscription again."""
    content = {"subscription": subscription, "position": position, "reason": reason, "actor": actor}
    given = {name: value for name, value in content.items() if value is not None}
    answer = call(
        url,
        "POST",
        path_of("transactions", transaction_id_of(transaction_id), "replay"),
        content=given,
        as_json=as_json,
    )
    if as_json:
        print_json(answer)
        return
    print(f"Replay {answer['replay_id']} has begun. Its progress: halfnote subscriptions")
    print(f"  replays {subscription} {answer['replay_id']}")


def filtered(
    group: str | None, state: str | None, born_after: str | None, born_before: str | None, limit: int, dry_run: bool
) -> dict[str, Any]:
    """Return a filter's request. Raises Refusal unless it names a group and a state."""
    if group is None or state is None:
        raise Refusal("Name a TRANSACTION_ID, or a filter by --group and --state.", code=2)
    times = _given(born_after=born_after, born_before=born_before)
    return {"producer_group": group, "state": state, "limit": limit, "dry_run": dry_run, **times}


def _refuse_filter(context: typer.Context) -> None:
    """Raise Refusal if --dry-run or a filter was given beside a TRANSACTION_ID: an act on one has no preview."""
    ignored = given(context, *OF_FILTER)
    if context.params["dry_run"]:
        ignored += given(context, "dry_run")
    if ignored:
        raise Refusal(
            f"{', '.join(ignored)} cannot go with a TRANSACTION_ID. Nothing was done. To see the transaction first: "
            "halfnote transactions show",
            code=WRONG_USAGE,
        )


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def _act(url: str, path: str, many: dict[str, Any], said: tuple[str, str], *, yes: bool, as_json: bool) -> None:
    """List what matches a filter; without a dry run, ask, and act on what was listed. Raises Refusal.

    What begins to match after the list was made is left alone. `said`: what is done, and the question.
    """
    done, question = said
    found = call(url, "POST", path, content={**many, "dry_run": True}, as_json=as_json)
    if many["dry_run"] or not found["matched"]:
        _print_answer({**found, "dry_run": many["dry_run"]}, done, as_json)
        return
    # With --json, stdout has the answer alone.
    print(*found["transaction_ids"], sep="\n", file=sys.stderr if as_json else sys.stdout)
    must_agree(question.format(count=found["matched"]), "Nothing was done.", yes=yes)
    chosen = {**many, "transaction_ids": found["transaction_ids"]}
    try:
        answer = call(url, "POST", path, content=chosen, as_json=as_json)
    except Refusal as refused:
        text = f"{refused}\n  Some may have been {done} all the same. Repeat the command for the rest."
        raise Refusal(text, code=refused.code, problem=refused.problem) from None
    if as_json:
        print_json({**answer, "more": found["more"]})
        return
    _print_count(answer["changed"], found, done)


def _asked(answer: dict[str, Any]) -> str:
    at = moment(answer["next_check_at"])
    if answer["held_until"] is None:
        return f"Halfnote asks its producer now ({at} UTC)."
    return (
        f"Its producer group asked for no checks until {at} UTC.\n"
        "Halfnote asks then, or at once when the group is registered again."
    )


def _print_answer(answer: dict[str, Any], done: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    for transaction_id in answer["transaction_ids"]:
        print(transaction_id)
    if answer["dry_run"]:
        print(f"{answer['matched']} would be {done}. To do it: --no-dry-run")
        _print_more(answer)
    else:
        _print_count(answer["changed"], answer, done)


def _print_count(changed: int, found: dict[str, Any], done: str) -> None:
    print(f"{changed} of {found['matched']} were {done}.")
    _print_more(found)


def _print_more(found: dict[str, Any]) -> None:
    if found["more"]:
        print("There may be more: repeat, or raise --limit.")
