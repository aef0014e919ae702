"""Acts on a producer group: ping its check URLs, rotate its secret."""

from typing import Any

from app.console.acts.act import ConsoleAct, Done, Preview, note_of
from app.console.acts.rotation import overlap_of, seen_by, with_state
from app.console.rendering import command, link
from app.console.visit import Visit
from app.routers.producer_groups import get_group, rotate_seen_secret, secret_state, test_group

_PATH = "/console/producer-groups/{name}/do"


async def _preview(visit: Visit, effect: str, act: str) -> Preview:
    shown = await get_group(visit.path["name"], visit.runtime, visit.caller)
    facts: list[tuple[str, Any]] = [("producer group", shown.name), ("check URLs", ", ".join(shown.check_urls))]
    back = link("producer-groups", shown.name)
    return Preview(shown.name, back, facts, effect, command("groups", act, shown.name))


async def _test_preview(visit: Visit) -> Preview:
    return await _preview(visit, "A signed `halfnote.ping` goes to each check URL now.", "test")


async def _test(visit: Visit, reason: str) -> Done:
    found = await test_group(visit.path["name"], visit.runtime, visit.caller, note_of(reason))
    results = [
        (one.url, f"{'answered' if one.ok else one.error or 'failed'}, {one.duration_ms} ms") for one in found.results
    ]
    ok = sum(one.ok for one in found.results)
    back = link("producer-groups", visit.path["name"])
    return Done(f"{ok} of {len(found.results)} check URLs answered.", back, results=results)


async def _rotate_preview(visit: Visit) -> Preview:
    effect = "A new secret is made and shown once. For 24 hours the former secret signs checks as well."
    state_seen = await secret_state(visit.path["name"], visit.runtime, visit.caller)
    return with_state(await _preview(visit, effect, "rotate-secret"), state_seen)


async def _rotate(visit: Visit, reason: str) -> Done:
    name, note = visit.path["name"], note_of(reason)
    made = await rotate_seen_secret(name, visit.runtime, visit.caller, note, seen=seen_by(visit))
    back = link("producer-groups", visit.path["name"])
    return Done("The new secret signs now.", back, secret=made.secret, results=overlap_of(made))


ACTS = [
    ConsoleAct(f"{_PATH}/test", "Test", ("POST", "/producer-groups/{name}/test"), _test_preview, _test),
    ConsoleAct(
        f"{_PATH}/rotate-secret",
        "Rotate secret",
        ("POST", "/producer-groups/{name}/rotate-secret"),
        _rotate_preview,
        _rotate,
        "bad",
    ),
]
