"""`halfnote search`: what a text names."""

from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, print_json
from app.cli.errors import Refusal
from app.cli.tables import print_table


def search(
    text: Annotated[str, typer.Argument(help="a transaction's or message's id, a key, or a part of a name")],
    limit: Annotated[int, typer.Option(help="the most of each kind")] = 10,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Find the transaction, message, topic, producer group or subscription that a text names."""
    found = call(url, "GET", "/search", query={"q": text, "limit": limit}, as_json=as_json)
    if as_json:
        print_json(found)
        return
    if not found["hits"]:
        raise Refusal(f"`{text}` is no id or key of a transaction that is stored, and no name contains it.")
    rows = [(one["kind"].replace("_", " "), one["name"], _about(one)) for one in found["hits"]]
    print_table(("kind", "id or name", "what"), rows, whole=("kind",))
    if found["more"]:
        print(f"\nThere are more: --limit {min(100, limit * 10)}")


def _about(one: dict[str, Any]) -> str:
    return f"{one['state']}, {one['producer_group']}: {one['topic']}" if "state" in one else ""
