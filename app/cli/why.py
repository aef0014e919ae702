"""`halfnote why`: why messages were delivered, or were not, in a sentence for each subscription."""

from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.errors import Refusal
from app.cli.tables import print_fields, print_table
from app.ids import parse_id

# Transactions of a key that the command names beside the newest.
OTHERS_MOST = 10


def why(
    what: Annotated[str, typer.Argument(metavar="ID_OR_KEY", help="a transaction's id, a message's id, or a key")],
    subscription: Annotated[str | None, typer.Option(help="only this subscription")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Explain why messages were delivered or were not. Of a key, its newest transaction is explained."""
    transaction_id, position = parse_id(what) or (None, None)
    others: list[str] = []
    if transaction_id is None:
        query = {"key": what, "limit": OTHERS_MOST + 1}
        found = [one["transaction_id"] for one in call(url, "GET", "/transactions", query=query)["items"]]
        if not found:
            raise Refusal(f"`{what}` is no id, and no recent transaction has a message of this key.")
        transaction_id, *others = found
    path = path_of("transactions", str(transaction_id), "delivery")
    query = {"position": position, "subscription": subscription}
    answer = call(url, "GET", path, query=query, as_json=as_json)
    # An older service during an upgrade answers all, without a cursor.
    while (cursor := answer.get("deliveries_cursor")) is not None:
        answer = _joined(answer, call(url, "GET", path, query={**query, "cursor": cursor}, as_json=as_json))
    if as_json:
        print_json(answer)
        return
    _print_why(answer)
    if others:
        print(f"\nEarlier transactions of this key: {', '.join(others[:1])}" + " and more" * (len(others) > 1))


def _joined(answer: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """Return two answers as one. The second may begin with the rest of the first one's last message."""
    *before, last = answer["messages"]
    first, *after = further["messages"]
    if first["message_id"] == last["message_id"]:
        last = {**last, "subscriptions": last["subscriptions"] + first["subscriptions"]}
    else:
        after = [first, *after]
    return {**further, "messages": [*before, last, *after]}


def _print_why(answer: dict[str, Any]) -> None:
    fields = {"transaction": answer["transaction_id"], "group": answer["producer_group"], "state": answer["state"]}
    print_fields(fields)
    for message in answer["messages"]:
        print()
        named = {"message": message["message_id"], "topic": message["topic"], "key": message["key"]}
        print_fields({**named, "tag": message["tag"], "result": message["sentence"]})
        rows = [(one["subscription"], one["sentence"]) for one in message["subscriptions"]]
        if rows:
            print()
            print_table(("subscription", "why"), rows)
        if message["left_out"]:
            print(f"{message['left_out']} more subscriptions take other topics.")
