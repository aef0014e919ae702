"""Print a transaction for `halfnote transactions show`: its state, its messages and its timeline."""

from datetime import datetime
from heapq import merge
from typing import Any

from app.cli.tables import moment, print_fields, print_table, text

# Timeline fields with their own column or form; `entry_text` does not repeat them.
FORMATTED = (
    *("at", "what", "check", "attempt", "attempts", "message_id", "subscription", "duration_ms", "offset"),
    *("times", "last_at"),
)


def with_attempts(transaction: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a transaction whose timeline also has these earlier attempts, which are latest first."""
    entries = merge(reversed(earlier), transaction["timeline"], key=lambda entry: datetime.fromisoformat(entry["at"]))
    return {**transaction, "timeline": list(entries), "attempts_cursor": None}


def with_deliveries(transaction: dict[str, Any], further: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a transaction whose messages and timeline also have these further deliveries."""
    messages = [{**message, "deliveries": list(message["deliveries"])} for message in transaction["messages"]]
    for one in further:
        position = int(one["message_id"].rpartition("-")[2])
        messages[position]["deliveries"].append({name: one[name] for name in one if name != "message_id"})
    entries = [entry for one in further if (entry := _settled_entry(one)) is not None]
    timeline = sorted([*transaction["timeline"], *entries], key=lambda entry: datetime.fromisoformat(entry["at"]))
    return {**transaction, "messages": messages, "timeline": timeline, "deliveries_cursor": None}


def _settled_entry(delivery: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entry of the timeline that the API makes of a delivery, if any."""
    if "at" not in delivery or delivery["state"] == "dropped":
        return None
    arrived = "replayed" if "replay" in delivery else "delivered"
    what = "dead" if delivery["state"] == "dead" else arrived
    left_out = ("state", "first_at", "due_at")
    return {"what": what, **{name: value for name, value in delivery.items() if name not in left_out}}


def print_transaction(transaction: dict[str, Any]) -> None:
    """Print `GET /transactions/{id}` for people."""
    print_fields(
        {
            "transaction": transaction["transaction_id"],
            "group": transaction["producer_group"],
            "state": transaction["state"],
            "born": f"{moment(transaction['born_at'])} UTC",
            "verdict": verdict_text(transaction.get("verdict")),
            "asked next": moment(transaction.get("next_check_at")),
            "parked because": transaction.get("parked_reason"),
            "reissue of": transaction.get("reissued_from"),
            "reissued as": transaction.get("reissued_as"),
            "context": text(transaction.get("context")),
        }
    )
    print()
    rows = [row for number, message in enumerate(transaction["messages"]) for row in message_rows(number, message)]
    print_table(("message", "topic", "key", "offset", "delivery"), rows)
    print()
    born = datetime.fromisoformat(transaction["born_at"])
    rows = [
        (f"{(datetime.fromisoformat(entry['at']) - born).total_seconds():+.3f} s", entry["what"], entry_text(entry))
        for entry in transaction["timeline"]
    ]
    print_table(("since birth", "what", "more"), rows, whole=("since birth", "what"))


def verdict_text(verdict: dict[str, Any] | None) -> str | None:
    """Return a recorded verdict in words."""
    if verdict is None:
        return None
    by = f"{verdict['source']} {verdict['actor']}" if verdict.get("actor") else verdict["source"]
    why = f": {verdict['reason']}" if verdict.get("reason") else ""
    return f"{verdict['verdict']} by {by} at {moment(verdict['decided_at'])} UTC{why}"


def message_rows(number: int, message: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a message's lines: one for each subscription, at least one."""
    name = message["topic"] if message["tag"] is None else f"{message['topic']} ({message['tag']})"
    first = (str(number), name, message["key"] or "", text(message.get("offset")) or "")
    deliveries = [delivery_text(one) for one in message["deliveries"]]
    if not deliveries:
        due = f"due {moment(message['due_at'])}" if message.get("due_at") else ""
        return [(*first, due or ("no subscription takes it" if message.get("offset") is not None else ""))]
    return [(*first, deliveries[0]), *(("", "", "", "", one) for one in deliveries[1:])]


def delivery_text(delivery: dict[str, Any]) -> str:
    """Return the state of a message's delivery to one subscription."""
    tries = f", {delivery['attempts']} attempts" if delivery["attempts"] > 1 else ""
    due = f", due {moment(delivery['due_at'])}" if delivery.get("due_at") else ""
    replay = f", replay {delivery['replay']}" if "replay" in delivery else ""
    return f"{delivery['subscription']}{replay}: {delivery['state']}{tries}{due}"


def entry_text(entry: dict[str, Any]) -> str:
    """Return a timeline entry on one line."""
    parts = []
    if "check" in entry:
        parts.append(f"no. {entry['check']}")
    if "message_id" in entry:
        parts.append(f"message {entry['message_id'].rpartition('-')[2]}")
    if "subscription" in entry:
        parts.append(f"to {entry['subscription']}")
    if "attempt" in entry:
        parts.append(f"attempt {entry['attempt']}")
    if entry.get("attempts", 1) > 1:
        parts.append(f"after {entry['attempts']} attempts")
    if "offset" in entry:
        parts.append(f"offset {entry['offset']}")
    parts += [
        f"{name} {value}" if name in NAMED else str(value) for name, value in entry.items() if name not in FORMATTED
    ]
    if "duration_ms" in entry:
        parts.append(f"{entry['duration_ms']} ms")
    if "times" in entry:
        parts.append(f"{entry['times']} times until {moment(entry['last_at'])} UTC")
    return ", ".join(parts)


# Fields whose name is printed with the value.
NAMED = ("source", "status", "replay", "reissued_from", "reissued_as", "next_check_at", "actor", "producer_group")
