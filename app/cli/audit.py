"""`halfnote audit`: list the actions of people, and verify that none was changed, removed or inserted later."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, list_items, print_json
from app.cli.audit_chain import Chain, witness_of_certificate, witness_of_text
from app.cli.given_options import refuse_before_command
from app.cli.since import Since, time_of
from app.cli.tables import moment, print_table, share

Actor = Annotated[str | None, typer.Option(help="by this person: a key's name, or a user of the command line")]
What = Annotated[str | None, typer.Option(help="of this kind, such as transaction.verdict")]
Target = Annotated[str | None, typer.Option(help="on this target: a name or an id")]
After = Annotated[str | None, typer.Option(help="at this time or later (RFC 3339)")]
Before = Annotated[str | None, typer.Option(help="before this time (RFC 3339)")]
Limit = Annotated[int, typer.Option(help="the most to list")]
Cursor = Annotated[str | None, typer.Option(help="the cursor that the previous list ended with")]


class AuditOrder(StrEnum):
    """The order of the list."""

    NEWEST = "newest"
    OLDEST = "oldest"


app = typer.Typer(help="The actions of people: list them (without a command), and verify their chain.")
DIFFERS = 3
Copies = Annotated[
    list[Path], typer.Option("--certificate", metavar="FILE", help="a copy of a day's certificate; repeatable")
]
Known = Annotated[
    list[str], typer.Option("--known", metavar="PLACE:DIGEST", help="what an earlier `verify` printed; repeatable")
]


@app.callback(invoke_without_command=True)
def audit(
    context: typer.Context,
    actor: Actor = None,
    what: What = None,
    target: Target = None,
    since: Since = None,
    after: After = None,
    before: Before = None,
    sort: Annotated[AuditOrder, typer.Option(help="newest or oldest first")] = AuditOrder.NEWEST,
    limit: Limit = 100,
    cursor: Cursor = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the actions of people, newest first, and how many there are."""
    if context.invoked_subcommand is not None:
        refuse_before_command(context)
        return
    at_or_later = time_of(since, after, "--after")
    query = {
        "actor": actor,
        "what": what,
        "target": target,
        "after": at_or_later,
        "before": before,
        "sort": sort.value,
        "count": True,
        "cursor": cursor,
    }
    found = list_items(url, "/audit", query, limit, as_json=as_json)
    if as_json:
        print_json(found)
        return
    print_table(("at (utc)", "who", "did", "to", "asking for"), [_row(one) for one in found["items"]])
    if found["next_cursor"]:
        print(f"\n{share(found)} There may be more: --cursor {found['next_cursor']}")


@app.command("verify")
def verify(certificate: Copies = [], known: Known = [], url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:  # noqa: B006
    """Compute the digest of each row of the audit again, and compare the chain with what was known of it earlier.

    --certificate and --known show also a chain whose last rows are gone, or that was made again. Keep the last line
    where no one who can write to the database can change it. Exit codes: 0 intact, 1 it failed, 2 wrong usage,
    3 something differs.
    """
    witnesses = [*map(witness_of_certificate, certificate), *map(witness_of_text, known)]
    seen = Chain(witnesses)
    cursor = None
    while True:
        page = call(url, "GET", "/audit/chain", query={"cursor": cursor}, as_json=as_json)
        seen.add(page)
        if (cursor := page["next_cursor"]) is None:
            break
    faults = seen.faults(page)
    if as_json:
        print_json(
            {
                "intact": not faults,
                "faults": faults,
                "not_compared": seen.not_compared,
                "rows": seen.rows,
                "place": seen.place,
                "digest": seen.digest,
            }
        )
    else:
        said = [*faults, *seen.not_compared]
        print(*said, sep="\n", end="\n" if said else "")
        state = "is intact" if not faults else f"differs in {len(faults)} places"
        print(f"The audit {state}: {seen.rows} rows. Its last one:\n{seen.place}:{seen.digest}")
    if faults:
        raise SystemExit(DIFFERS)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    detail = json.dumps(one["detail"], ensure_ascii=False) if one["detail"] else ""
    return moment(one["at"]) or "", one["actor"] or "(auth off)", one["what"], one["target"] or "", detail
