"""`halfnote transactions`: where they stand, and what a person does about them."""

from typing import Annotated, Any

import typer

from app.cli.api import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.show import print_transaction
from app.cli.tables import print_table, short_moment

app = typer.Typer(help="Transactions: where they stand, and verdicts by a person.", no_args_is_help=True)

# What the API gives at most on one page.
PAGE_MAX = 1000

TransactionId = Annotated[str, typer.Argument(metavar="TRANSACTION_ID")]
Group = Annotated[str | None, typer.Option(help="of this producer group")]
StateName = Annotated[str | None, typer.Option(help="half, in_doubt, parked, committed or rolled_back")]
BornAfter = Annotated[str | None, typer.Option(help="born at this time or later (RFC 3339)")]
BornBefore = Annotated[str | None, typer.Option(help="born before this time (RFC 3339)")]


@app.command("list")
def list_transactions(
    group: Group = None,
    state: StateName = None,
    topic: Annotated[str | None, typer.Option(help="with a message on this topic")] = None,
    key: Annotated[str | None, typer.Option(help="with a message of this key")] = None,
    born_after: BornAfter = None,
    born_before: BornBefore = None,
    limit: Annotated[int, typer.Option(help="at most so many")] = 50,
    cursor: Annotated[str | None, typer.Option(help="where the list before ended")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List transactions, newest first."""
    query = {
        "producer_group": group,
        "state": state,
        "topic": topic,
        "key": key,
        "born_after": born_after,
        "born_before": born_before,
    }
    page = gathered(url, query, limit, cursor, as_json)
    if as_json:
        print_json(page)
        return
    rows = [(one["transaction_id"], one["state"], short_moment(one["born_at"]), about(one)) for one in page["items"]]
    print_table(
        ("transaction", "state", "born (utc)", "group: topic"), rows, whole=("transaction", "state", "born (utc)")
    )
    if page["next_cursor"]:
        print(f"\nThere may be more: --cursor {page['next_cursor']}")


def gathered(url: str, query: dict[str, Any], limit: int, cursor: str | None, as_json: bool) -> dict[str, Any]:
    """Return up to `limit` transactions; a page of the API may hold fewer than there are."""
    found: list[dict[str, Any]] = []
    while True:
        asked = {**query, "limit": min(limit - len(found), PAGE_MAX), "cursor": cursor}
        page = call(url, "GET", "/transactions", query=asked, as_json=as_json)
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None or len(found) >= limit:
            return {"items": found, "next_cursor": cursor}


def about(one: dict[str, Any]) -> str:
    """Return whose transaction it is and what its first message is."""
    first = one["topic"] if one["key"] is None else f"{one['topic']} {one['key']}"
    more = f" +{one['message_count'] - 1}" if one["message_count"] > 1 else ""
    return f"{one['producer_group']}: {first}{more}"


@app.command("show")
def show(transaction_id: TransactionId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a transaction: its verdict, its messages and where they went, and its timeline."""
    transaction = call(url, "GET", path_of("transactions", transaction_id), as_json=as_json)
    print_json(transaction) if as_json else print_transaction(transaction)
