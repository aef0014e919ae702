"""`halfnote messages`: show a message with its body and its deliveries."""

from typing import Annotated

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import json_text, moment, print_fields, print_table, text

app = typer.Typer(help="Messages: their bodies and their deliveries.", no_args_is_help=True, cls=SortedCommands)

MessageId = Annotated[str, typer.Argument(metavar="MESSAGE_ID", help="`TRANSACTION_ID-POSITION`")]


@app.command("show")
def show(message_id: MessageId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a message of any transaction, committed or not: its fields, its body and its deliveries.

    A JSON body is printed as JSON: a text has quotes. In a pipe each field is one line.
    """
    path = path_of("messages", message_id)
    one = call(url, "GET", path, as_json=as_json)
    while (cursor := one.get("deliveries_cursor")) is not None:
        further = call(url, "GET", path, query={"cursor": cursor}, as_json=as_json)
        one = {**further, "deliveries": one["deliveries"] + further["deliveries"]}
    if as_json:
        print_json(one)
        return
    print_fields(
        {
            "message": one["message_id"],
            "transaction": one["transaction_id"],
            "group": one["producer_group"],
            "state": one["state"],
            "born": f"{moment(one['born_at'])} UTC",
            "committed": f"{moment(one['committed_at'])} UTC" if one.get("committed_at") else None,
            "topic": one["topic"],
            "key": one["key"],
            "tag": one["tag"],
            "headers": text(one["headers"] or None),
            "offset": text(one.get("offset")),
            "content type": one["content_type"],
            "body": json_text(one["body"]) if "body" in one else None,
            "body (base64)": one.get("body_base64"),
        }
    )
    rows = [(each["subscription"], each["state"], text(each["attempts"]) or "") for each in one["deliveries"]]
    if rows:
        print()
        print_table(("subscription", "state", "attempts"), rows)
