"""`halfnote transactions`: list and show transactions."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, all_pages, call, list_items, path_of, print_json
from app.cli.since import Since, time_of
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import age, print_table, share
from app.cli.transaction_ids import transaction_id_of
from app.cli.transaction_view import print_transaction, with_attempts, with_deliveries

app = typer.Typer(
    help="Transactions: their states, and verdicts by a person.", no_args_is_help=True, cls=SortedCommands
)

TransactionId = Annotated[str, typer.Argument(metavar="TRANSACTION_ID")]
Group = Annotated[str | None, typer.Option(help="of this producer group")]
StateName = Annotated[str | None, typer.Option(help="half, in_doubt, parked, committed or rolled_back")]
BornAfter = Annotated[str | None, typer.Option(help="born at this time or later (RFC 3339)")]
BornBefore = Annotated[str | None, typer.Option(help="born before this time (RFC 3339)")]


class TransactionOrder(StrEnum):
    """The order of the list."""

    NEWEST = "newest"
    OLDEST = "oldest"


@app.command("list")
def list_transactions(
    group: Group = None,
    state: StateName = None,
    source: Annotated[str | None, typer.Option(help="decided by: producer, check, policy or operator")] = None,
    refused_end: Annotated[
        bool | None, typer.Option(help="only those with (without) an end that was refused after another verdict")
    ] = None,
    reissued: Annotated[
        bool | None, typer.Option(help="only those that were (were not) reissued as another transaction")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="with a message on this topic")] = None,
    key: Annotated[str | None, typer.Option(help="with a message with this key")] = None,
    since: Since = None,
    born_after: BornAfter = None,
    born_before: BornBefore = None,
    sort: Annotated[TransactionOrder, typer.Option(help="newest or oldest first")] = TransactionOrder.NEWEST,
    limit: Annotated[int, typer.Option(help="the most to list")] = 50,
    cursor: Annotated[str | None, typer.Option(help="the cursor that the previous list ended with")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List transactions, newest first, and how many there are."""
    query = {
        "producer_group": group,
        "state": state,
        "source": source,
        "refused_end": refused_end,
        "reissued": reissued,
        "topic": topic,
        "key": key,
        "born_after": time_of(since, born_after, "--born-after"),
        "born_before": born_before,
        "sort": sort.value,
        "count": True,
        "cursor": cursor,
    }
    page = list_items(url, "/transactions", query, limit, as_json=as_json)
    if as_json:
        print_json(page)
        return
    now = datetime.now(UTC)
    rows = [
        (one["transaction_id"], one["state"], age(one["born_at"], now), _last_check(one, now), about(one))
        for one in page["items"]
    ]
    print_table(
        ("transaction", "state", "born", "last check", "group: topic"), rows, whole=("transaction", "state", "born")
    )
    if page["next_cursor"]:
        print(f"\n{share(page)} There may be more: --cursor {page['next_cursor']}")


def _last_check(one: dict[str, Any], now: datetime) -> str:
    last = one.get("last_check")
    return f"{last['outcome']} {age(last['at'], now)}" if last else ""


def about(one: dict[str, Any]) -> str:
    """Return a transaction's producer group and its first message's topic and key."""
    first = one["topic"] if one["key"] is None else f"{one['topic']} {one['key']}"
    more = f" +{one['message_count'] - 1}" if one["message_count"] > 1 else ""
    return f"{one['producer_group']}: {first}{more}"


@app.command("show")
def show(transaction_id: TransactionId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a transaction: its verdict, its messages and their deliveries, and its timeline."""
    path = path_of("transactions", transaction_id_of(transaction_id, or_message=True))
    transaction = call(url, "GET", path, as_json=as_json)
    if transaction["attempts_cursor"] is not None:
        earlier = all_pages(url, f"{path}/attempts", cursor=transaction["attempts_cursor"], as_json=as_json)
        transaction = with_attempts(transaction, earlier)
    # An older service during an upgrade answers all, without a cursor.
    if transaction.get("deliveries_cursor") is not None:
        further = all_pages(url, f"{path}/deliveries", cursor=transaction["deliveries_cursor"], as_json=as_json)
        transaction = with_deliveries(transaction, further)
    print_json(transaction) if as_json else print_transaction(transaction)
