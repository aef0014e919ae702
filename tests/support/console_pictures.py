"""The pictures of docs/console.md, and how they are taken."""

import os
from pathlib import Path

from playwright.sync_api import Browser

from tests.support.browser import Watched
from tests.support.processes import ROOT

SCHEMES = ("light", "dark")
# Names of pictures and paths of pages below /console.
PAGES = {
    "overview": "",
    "search": "/search?q=order",
    "transactions": "/transactions",
    "transaction": "/transactions/{order-1030}",
    "act": "/transactions/{order-1033}/do/commit",
    "subscriptions": "/subscriptions",
    "subscription": "/subscriptions/warehouse",
    "dead-letters": "/dead-letters",
    "dead-letter-groups": "/dead-letters/groups",
    "producer-groups": "/producer-groups",
    "producer-group": "/producer-groups/shop",
    "topics": "/topics",
    "workers": "/workers",
    "keys": "/keys",
    "audit": "/audit",
}
# Those that need a run of the proof, or a service with keys.
PAGES_OF_PROOF = ("sign-in", "proof", "proof-day", "report", "findings", "finding")


def take(watched: Watched, name: str, scheme: str, place: Path) -> None:
    """Take a picture of the page that is open."""
    watched.page.screenshot(path=place / f"{name}-{scheme}.png")


def place_of(tmp_path: Path) -> Path:
    """Return where pictures are written: with `make screenshots` into the docs."""
    place = Path(os.environ.get("HALFNOTE_SCREENSHOTS") or tmp_path)
    place.mkdir(exist_ok=True)
    return place


def opened(browser: Browser, scheme: str) -> Watched:
    """Return a page of the size of the pictures."""
    watched = Watched(browser, "desktop", scheme)
    watched.page.set_viewport_size({"width": 1280, "height": 720})
    return watched


def unlisted() -> list[str]:
    """Return what docs/console.md does not show, or shows without a test that makes it."""
    names = {f"{name}-{scheme}" for name in (*PAGES, *PAGES_OF_PROOF) for scheme in SCHEMES}
    page = (ROOT / "docs" / "console.md").read_text()
    made = {path.stem for path in (ROOT / "docs" / "console").glob("*.png")}
    return [*(name for name in names if f"console/{name}.png" not in page), *sorted(made ^ names)]
