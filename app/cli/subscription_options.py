"""Build the request of `halfnote subscriptions put` from its options, and print a subscription."""

import json
from collections.abc import Sequence
from typing import Any

from app.cli.errors import Refusal
from app.cli.tables import moment, print_fields, reset_line, text

# The scheme of a destination's address, and the kind of the destination.
SCHEMES = {
    **dict.fromkeys(("http", "https"), "webhook"),
    **dict.fromkeys(("amqp", "amqps"), "rabbitmq"),
    **dict.fromkeys(("nats", "tls"), "nats"),
    **dict.fromkeys(("redis", "rediss"), "redis"),
    **dict.fromkeys(("kafka", "kafka+tls"), "kafka"),
}
# The type of destination without an address: consumers claim the messages.
PULL = "pull"
# Fields of destinations that are JSON rather than text.
NOT_TEXT = ("batch_max", "bootstrap", "consent", "headers", "maxlen", "tls")
# Fields that name a target within a broker.
TARGET_FIELDS = ("exchange", "routing_key", "subject", "topic", "stream")


def destination_from(
    filed: dict[str, Any] | None, to: str | None, fields: Sequence[str], secret: str | None
) -> dict[str, Any] | None:
    """Return a destination: the file's, overridden by the address and then by the fields. Raises Refusal."""
    found = dict(filed or {})
    if to is not None:
        named = address_of(to)
        found = named if named["type"] != found.get("type") else {**found, **named}
    for field in fields:
        name, given, value = field.partition("=")
        if not given:
            raise Refusal(f"--set takes FIELD=VALUE, not `{field}`.", code=2)
        found[name] = _value(value) if name in NOT_TEXT else value
    if secret is not None:
        found["secret"] = secret
    return found or None


def address_of(to: str) -> dict[str, Any]:
    """Return the destination that an address names, with its type. Raises Refusal."""
    if to == PULL:
        return {"type": PULL}
    scheme, _, rest = to.partition("://")
    kind = SCHEMES.get(scheme.lower())
    if kind is None or not rest:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise Refusal(
            f"`{to}` is not the address of a destination; it is `{PULL}`, or begins with one of {known}.", code=2
        )
    if kind == "kafka":
        return {"type": kind, "bootstrap": rest.rstrip("/").split(","), "tls": scheme.lower() == "kafka+tls"}
    return {"type": kind, "url": to}


def _value(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def address_text(destination: dict[str, Any]) -> str:
    """Return a destination's address on one line."""
    if destination["type"] == PULL:
        return PULL
    if destination["type"] != "kafka":
        return str(destination["url"])
    return f"kafka{'+tls' if destination['tls'] else ''}://{','.join(destination['bootstrap'])}"


def print_subscription(subscription: dict[str, Any]) -> None:
    """Print the answer of `GET /subscriptions/{name}` or of a PUT for people."""
    filters = subscription["filters"] or {}
    because = f": {subscription['state_reason']}" if subscription["state_reason"] else ""
    print_fields(
        {
            "subscription": subscription["name"],
            "state": f"{subscription['state']}{because}",
            "topics": ", ".join(subscription["topics"]),
            "tags": ", ".join(filters.get("tags") or []) or None,
            "headers": text(filters.get("headers")),
            "to": address_text(subscription["destination"]),
            **_destination_fields(subscription["destination"]),
            "started at": text(subscription["start"]),
            "order": _order(subscription),
            "shards": text(subscription["shards"]) if subscription["shards"] > 1 else None,
            "requests": f"{subscription['max_in_flight']} at once, {subscription['timeout_s']:g} s each at most",
            "rate": f"{subscription['rate_per_s']:g} a second at most" if subscription["rate_per_s"] else None,
            "tries": f"{len(subscription['retry']) + 1}, then a dead letter",
            "waits": _waits(subscription),
            **_progress(subscription),
            "secret (shown this once)": subscription.get("secret"),
            **reset_line(subscription),
        }
    )


def _destination_fields(destination: dict[str, Any]) -> dict[str, str | None]:
    """Return the fields of a destination besides its address."""
    if destination["type"] != "webhook":
        named = [f"{name.replace('_', ' ')} {destination[name]}" for name in TARGET_FIELDS if destination.get(name)]
        trimmed = [f"about {destination['maxlen']} entries"] if destination.get("maxlen") else []
        sasl = f" by {destination['sasl']}" if destination.get("sasl") else ""
        user = f"{destination['username']}{sasl}" if destination.get("username") else None
        return {"into": ", ".join(named + trimmed) or None, "as": user}
    mode, granted = destination["mode"], destination["granted_rate_per_s"]
    batches = f", up to {destination['batch_max']} a request" if mode in ("batch", "auto") else ""
    return {
        "own headers": ", ".join(destination["header_names"]) or None,
        "mode": f"{mode}{batches}" if mode != "binary" else None,
        "public key": destination["public_key"],
        "consented": (f"to {granted:g} a second" if granted else "yes") if destination["consent"] else None,
    }


def _order(subscription: dict[str, Any]) -> str | None:
    if subscription["ordered"] != "key":
        return None
    return "by key; a dead letter " + ("holds its key" if subscription["on_dead"] == "hold" else "releases its key")


def _waits(subscription: dict[str, Any]) -> str | None:
    expire_after_s, max_backlog = subscription["expire_after_s"], subscription["max_backlog"]
    limits = [f"{expire_after_s:g} s at most"] if expire_after_s is not None else []
    limits += [f"{max_backlog} messages at most"] if max_backlog is not None else []
    return ", ".join(limits) + ", then a dead letter" if limits else None


def _progress(subscription: dict[str, Any]) -> dict[str, str | None]:
    """Return checkpoint, lag and rates, which only `GET` answers."""
    if "lag" not in subscription:
        return {}
    lag, checkpoint, rates = subscription["lag"], subscription["checkpoint"], subscription["rates"]
    behind = f"{lag['messages']}{'' if lag['exact'] else ' or more'} messages, the oldest {lag['seconds']:.1f} s old"
    failed = f", {rates['failed_per_s']:.1f} fail" if rates["failed_per_s"] else ""
    return {
        "read up to": f"offset {checkpoint['offset']}, {moment(checkpoint['moved_at'])} UTC",
        "behind": behind if lag["messages"] else "nothing waits",
        "goes at": f"{rates['delivered_per_s']:.1f} a second{failed}",
        "breaker": _breaker(subscription["breaker"]),
        "holders": _holders(subscription["places"]),
        "in retry": text(subscription["retrying"]),
        "held for their key": text(subscription["held"]) if subscription["ordered"] == "key" else None,
        "dead letters": text(subscription["dead_letters"]),
        "last error": subscription["last_error"],
        "replays": ", ".join(map(str, subscription["replays"])) or None,
    }


def _breaker(breaker: dict[str, Any]) -> str | None:
    if breaker["state"] == "open":
        return f"open since {moment(breaker['opened_at'])} UTC"
    paused_until = breaker.get("paused_until")
    return f"the destination asked for a pause until {moment(paused_until)} UTC" if paused_until else None


def _holders(places: list[dict[str, Any]]) -> str:
    """Return the worker of each shard; each worker by the first characters of its name."""
    if len(places) == 1:
        return f"worker {places[0]['holder'][:8]}" if places[0]["holder"] else "none at the moment"
    held: dict[str, list[str]] = {}
    for one in places:
        held.setdefault(one["holder"] or "", []).append(str(one["shard"]))
    return "; ".join(
        f"{'worker ' + holder[:8] if holder else 'none'}: shard{'s' if len(shards) > 1 else ''} {', '.join(shards)}"
        for holder, shards in held.items()
    )
