"""Carry out changes, one request after another."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from app.cli.api_client import call, path_of
from app.cli.declared.changes import PATHS, Action, Change, outlives_overlap, replaces, wanted_key
from app.cli.declared.secrets_out import SecretsOut
from app.cli.errors import Refusal
from app.schemas.api_keys import OVERLAP_S

# How to get a secret whose only answer was lost.
AGAIN = {
    "groups": "halfnote groups rotate-secret NAME",
    "subscriptions": "halfnote subscriptions rotate-secret NAME",
    "keys": "halfnote keys rotate KEY_ID",
}


def carry_out(url: str, changes: list[Change], secrets: SecretsOut, done: Callable[[Change], None]) -> None:
    """Carry out changes in order, and call `done` after each. Raises Refusal that says what was not applied."""
    wanted = [one for one in changes if one.action is not Action.UNCHANGED]
    for n, change in enumerate(wanted):
        try:
            _carry_out(url, change, secrets)
        except Refusal as refusal:
            raise Refusal(_stopped(wanted, n, refusal), problem=refusal.problem) from None
        done(change)


def _stopped(wanted: list[Change], failed: int, refusal: Refusal) -> str:
    change = wanted[failed]
    rest = ", ".join(f"{one.section}.{one.name}" for one in wanted[failed + 1 :]) or "nothing else"
    text = (
        f"{change.section}.{change.name} was not applied: {refusal}\n"
        f"  Applied before: {failed} of {len(wanted)}. Not tried: {rest}.\n"
        "  Run the command again to continue."
    )
    # After a 5xx the service may have stored the change.
    if change.makes_secret and refusal.problem.get("status") not in range(400, 500):
        again = AGAIN[change.section].replace("NAME", change.name)
        text += f"\n  If the next run finds it unchanged, its secret was not kept: `{again}` makes another."
    return text


def _carry_out(url: str, change: Change, secrets: SecretsOut) -> None:
    if change.action is Action.DELETE:
        _delete(url, change)
    elif change.section == "topics":
        call(url, "PUT", path_of("topics", change.name))
    elif change.section == "keys":
        _key(url, change, secrets)
    else:
        assert change.declared is not None
        answer = call(url, "PUT", path_of(PATHS[change.section], change.name), content=change.declared.content)
        if answer.get("secret"):
            secrets.add(change.section, change.name, answer["secret"])


def _key(url: str, change: Change, secrets: SecretsOut) -> None:
    assert change.declared is not None
    wanted, chosen = wanted_key(change.declared), change.declared.content.get("key")
    is_new = not change.keys or replaces(change.declared, change.keys)
    if is_new:
        content = wanted if chosen is None else {**wanted, "key": chosen}
        made: dict[str, Any] = call(url, "POST", "/api-keys", content=content)
        if made["key"] is not None:
            secrets.add("keys", change.name, made["key"])
    for n, key in enumerate(change.keys):
        # A former key, which a rotation replaced, keeps its expiry. One that a declared key replaced gets one.
        end = _end(key, is_replaced=chosen is not None)
        content = wanted if n == 0 and not is_new else {**wanted, "expires_at": end}
        call(url, "PUT", path_of("api-keys", str(key["key_id"])), content=content)


def _end(key: dict[str, Any], *, is_replaced: bool) -> str | None:
    """Return when a former key expires: in a day if it was replaced, unless it expires earlier."""
    if is_replaced and outlives_overlap(key):
        return (datetime.now(UTC) + timedelta(seconds=OVERLAP_S)).isoformat()
    end: str | None = key["expires_at"]
    return end


def _delete(url: str, change: Change) -> None:
    if change.section == "keys":
        for key in change.keys:
            call(url, "DELETE", path_of("api-keys", str(key["key_id"])))
    else:
        call(url, "DELETE", path_of(PATHS.get(change.section, change.section), change.name))
