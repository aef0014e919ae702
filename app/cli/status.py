"""`halfnote status`: the state of the service on one screen."""

from datetime import datetime
from typing import Any

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, print_json
from app.cli.tables import age, amount, bytes_text, print_table

_DONE = {
    "halves": "halves",
    "commits": "commits",
    "rollbacks": "rollbacks",
    "deliveries": "deliveries",
    "failed_attempts": "failed attempts",
    "checks": "checks",
}


def status(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show on one screen what is in doubt, dead, late and held, what was done, and the command that lists each."""
    found = call(url, "GET", "/stats", as_json=as_json)
    if as_json:
        print_json(found)
        return
    print_status(found)


def print_status(found: dict[str, Any]) -> None:
    """Print the answer of `GET /stats`."""
    print_table(("figure", "now", "listed by"), _standing(found), whole=("figure", "listed by"))
    print()
    short, long = found["activity"]
    rows = [(label, *_done(short[name]), *_done(long[name])) for name, label in _DONE.items()]
    print_table(("done", "15 min", "per s", "24 h", "per s"), rows)


def _standing(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    now = datetime.fromisoformat(found["at"])
    doubt, parked, dead = found["in_doubt"], found["parked"], found["dead_letters"]
    disk, workers, states = found["disk"], found["workers"], found["subscriptions"]
    free = "" if disk["free_bytes"] is None else f", {bytes_text(disk['free_bytes'])} free"
    unheld = f", {workers['unheld_shards']} shards without a worker" if workers["unheld_shards"] else ""
    held = "; ".join(f"{one['day']}: {', '.join(one['causes'])}" for one in found["held_days"])
    return [
        ("in doubt", _oldest(doubt, doubt["oldest_born_at"], now), "transactions list --state in_doubt"),
        ("parked", _oldest(parked, parked["oldest_born_at"], now), "transactions list --state parked"),
        ("dead letters", _oldest(dead, dead["oldest_at"], now), "dead-letters list"),
        ("open breakers", _breakers(found["breakers"], now), "subscriptions list"),
        ("oldest lag", *_lag(found["lag"])),
        ("subscriptions", ", ".join(f"{count} {state}" for state, count in states.items()), "subscriptions list"),
        ("held days", held or "none", "reconcile --help"),
        ("database", bytes_text(disk["database_bytes"]) + free, ""),
        ("workers", f"{workers['present']}{unheld}", "workers"),
        ("last proof", _proof(found["proof"], now), "findings"),
    ]


def _oldest(counted: dict[str, Any], oldest_at: str | None, now: datetime) -> str:
    count = ("" if counted["exact"] else "about ") + amount(counted["count"])
    return count if oldest_at is None else f"{count}, oldest {age(oldest_at, now)}"


def _breakers(breakers: dict[str, Any], now: datetime) -> str:
    named = [f"{one['subscription']} (opened {age(one['opened_at'], now)})" for one in breakers["first"][:3]]
    more = [f"{breakers['count'] - len(named)} more"] if breakers["count"] > len(named) else []
    return ", ".join([*named, *more]) or "none"


def _lag(lag: dict[str, Any] | None) -> tuple[str, str]:
    if lag is None:
        return "none", "subscriptions list"
    messages = amount(lag["messages"]) + ("" if lag["exact"] else " or more")
    return (
        f"{lag['subscription']}: {messages} messages, {lag['seconds']:,.1f} s",
        f"subscriptions get {lag['subscription']}",
    )


def _proof(proof: dict[str, Any] | None, now: datetime) -> str:
    if proof is None:
        return "no run yet"
    return f"{proof['state']} {age(proof['ended_at'], now)}, {amount(proof['open_findings'])} open findings"


def _done(one: dict[str, Any]) -> tuple[str, str]:
    return amount(one["count"]), f"{one['per_s']:,.1f}"
