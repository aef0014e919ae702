"""What `halfnote subscriptions put` asks for, and how a subscription is printed."""

import json
from collections.abc import Sequence
from typing import Any

from app.cli.refusal import Refusal
from app.cli.tables import moment, print_fields, text

# What a destination's address begins with, and what kind it is of.
SCHEMES = {
    **dict.fromkeys(("http", "https"), "webhook"),
    **dict.fromkeys(("amqp", "amqps"), "rabbitmq"),
    **dict.fromkeys(("nats", "tls"), "nats"),
    **dict.fromkeys(("redis", "rediss"), "redis"),
    **dict.fromkeys(("kafka", "kafka+tls"), "kafka"),
}
# The fields of destinations that are no text.
NOT_TEXT = ("batch_max", "bootstrap", "consent", "headers", "maxlen", "tls")
# The fields that say where in a broker the messages go.
PLACES = ("exchange", "routing_key", "subject", "topic", "stream")


def destination_from(
    filed: dict[str, Any] | None, to: str | None, fields: Sequence[str], secret: str | None
) -> dict[str, Any] | None:
    """Return a destination: the file's, what an address says, and fields over it. Raises Refusal."""
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
    """Return the destination that an address names, kind and all. Raises Refusal."""
    scheme, _, rest = to.partition("://")
    kind = SCHEMES.get(scheme.lower())
    if kind is None or not rest:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise Refusal(f"`{to}` is no address of a destination; they begin with {known}.", code=2)
    if kind == "kafka":
        return {"type": kind, "bootstrap": rest.rstrip("/").split(","), "tls": scheme.lower() == "kafka+tls"}
    return {"type": kind, "url": to}


def _value(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def address_text(destination: dict[str, Any]) -> str:
    """Return where a destination is, on one line."""
    if destination["type"] != "kafka":
        return str(destination["url"])
    return f"kafka{'+tls' if destination['tls'] else ''}://{','.join(destination['bootstrap'])}"


def print_subscription(subscription: dict[str, Any]) -> None:
    """Print `GET /subscriptions/{name}`, or what a PUT answered, for people."""
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
            **_place(subscription["destination"]),
            "started at": text(subscription["start"]),
            "order": _order(subscription),
            "shards": text(subscription["shards"]) if subscription["shards"] > 1 else None,
            "requests": f"{subscription['max_in_flight']} at once, {subscription['timeout_s']:g} s each at most",
            "rate": f"{subscription['rate_per_s']:g} a second at most" if subscription["rate_per_s"] else None,
            "tries": f"{len(subscription['retry']) + 1}, then a dead letter",
            **_standing(subscription),
            "secret (shown this once)": subscription.get("secret"),
        }
    )


def _place(destination: dict[str, Any]) -> dict[str, str | None]:
    """Return what else is to be known of a destination."""
    if destination["type"] != "webhook":
        named = [f"{name.replace('_', ' ')} {destination[name]}" for name in PLACES if destination.get(name)]
        trimmed = [f"about {destination['maxlen']} entries"] if destination.get("maxlen") else []
        sasl = f" by {destination['sasl']}" if destination.get("sasl") else ""
        user = f"{destination['username']}{sasl}" if destination.get("username") else None
        return {"into": ", ".join(named + trimmed) or None, "as": user}
    mode, granted = destination["mode"], destination["granted_rate_per_s"]
    batches = f", up to {destination['batch_max']} a request" if mode == "batch" else ""
    return {
        "own headers": ", ".join(destination["header_names"]) or None,
        "mode": f"{mode}{batches}" if mode != "binary" else None,
        "public key": destination["public_key"],
        "consented": (f"to {granted:g} a second" if granted else "yes") if destination["consent"] else None,
    }


def _order(subscription: dict[str, Any]) -> str | None:
    if subscription["ordered"] != "key":
        return None
    return "by key; a dead letter " + ("holds its key" if subscription["on_dead"] == "hold" else "lets the next go")


def _standing(subscription: dict[str, Any]) -> dict[str, str | None]:
    """Return where it stands; only `GET` says so."""
    if "lag" not in subscription:
        return {}
    lag, checkpoint, rates = subscription["lag"], subscription["checkpoint"], subscription["rates"]
    behind = f"{lag['messages']}{'' if lag['exact'] else ' or more'} messages, the oldest {lag['seconds']:.1f} s old"
    failed = f", {rates['failed_per_s']:.1f} fail" if rates["failed_per_s"] else ""
    return {
        "read up to": f"offset {checkpoint['offset']}, {moment(checkpoint['moved_at'])} UTC",
        "behind": behind if lag["messages"] else "nothing waits",
        "goes at": f"{rates['delivered_per_s']:.1f} a second{failed}",
        "breaker": f"open since {moment(subscription['breaker']['opened_at'])} UTC"
        if subscription["breaker"]["state"] == "open"
        else None,
        "holders": _holders(subscription["places"]),
        "in retry": text(subscription["retrying"]),
        "held for their key": text(subscription["held"]) if subscription["ordered"] == "key" else None,
        "dead letters": text(subscription["dead_letters"]),
        "last error": subscription["last_error"],
        "replays": ", ".join(map(str, subscription["replays"])) or None,
    }


def _holders(places: list[dict[str, Any]]) -> str:
    """Return which shards have a worker, in few words: each worker by the beginning of its name."""
    if len(places) == 1:
        return f"worker {places[0]['holder'][:8]}" if places[0]["holder"] else "none at the moment"
    held: dict[str, list[str]] = {}
    for place in places:
        held.setdefault(place["holder"] or "", []).append(str(place["shard"]))
    return "; ".join(
        f"{'worker ' + holder[:8] if holder else 'none'}: shard{'s' if len(shards) > 1 else ''} {', '.join(shards)}"
        for holder, shards in held.items()
    )
