"""`halfnote workers`: which process delivers which subscriptions."""

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, print_json
from app.cli.tables import moment, print_table


def workers(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the worker processes with what each delivers, and what no process delivers."""
    found = call(url, "GET", "/workers", as_json=as_json)
    if as_json:
        print_json(found)
        return
    rows = []
    for one in found["items"]:
        held = ", ".join(_place(place) for place in one["shards"]) or ", ".join(one["tasks"]) or "nothing"
        rows.append((one["worker"], moment(one["present_until"]) or "", held))
    print_table(("worker", "present until", "delivers"), rows)
    if found["unheld"]:
        print(f"\nNo worker delivers: {', '.join(_place(place) for place in found['unheld'])}")


def _place(place: dict[str, object]) -> str:
    many = f" {place['shard']}/{place['shards']}" if place["shards"] != 1 else ""
    since = f" (since {moment(str(place['held_since']))})" if place.get("held_since") else ""
    return f"{place['subscription']}{many}{since}"
