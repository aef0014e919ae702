"""Debian's Chromium: pages that note what went wrong on them, and what axe says of them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Request, Response, StorageState, expect, sync_playwright

from app.console.site import PAGES
from tests.support.console_world import World
from tests.support.requirements import absent

AXE = (Path(__file__).parents[1] / "console" / "axe" / "axe.min.js").read_text()
# A desktop, the same at 200 % zoom, and a phone.
SIZES = {"desktop": (1280, 800), "zoomed": (640, 400), "phone": (390, 844)}
# How long an expectation waits, in ms. Playwright's 5 s are too few on a busy machine.
expect.set_options(timeout=30_000)
# Pages that show nothing of their own.
_OTHER = ("/console/find", "/console/events", "/console/proof/report")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a Chromium. Skips the test, or fails it, where there is none."""
    path = shutil.which("chromium")
    if path is None:
        absent("Debian's chromium is not installed", "DEPS")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


class Watched:
    """A page of a new context, and what its console and its requests say went wrong.

    `kept`: what another context kept, such as its sign-in.
    """

    def __init__(
        self, browser: Browser, size: str = "desktop", scheme: Any = "light", kept: StorageState | None = None
    ) -> None:
        width, height = SIZES[size]
        self.context: BrowserContext = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, storage_state=kept
        )
        self.page: Page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("requestfailed", self._failed)

    def _failed(self, request: Request) -> None:
        # A page that is left ends its stream, the load of itself that it may have begun, and that of its icon.
        is_ended = request.resource_type in ("fetch", "eventsource") or "/icon.svg?" in request.url
        is_left = request.failure == "net::ERR_ABORTED" and is_ended
        if not is_left:
            self.faults.append(f"{request.url}: {request.failure}")

    def open(self, url: str) -> Response:
        """Open a page; return its answer."""
        answer = self.page.goto(url)
        assert answer is not None
        return answer

    def sign_in(self, url: str, key: str) -> None:
        """Sign in with a key, as a person does."""
        self.open(f"{url}/console")
        self.page.locator("input[name=key]").fill(key)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url("**/console")

    def violations(self) -> list[tuple[str, str]]:
        """Return the rule and the element of each violation that axe finds on the page."""
        # Through the debugging protocol, which the policy of the page does not concern.
        self.page.evaluate(AXE)
        found = self.page.evaluate('async () => (await axe.run({resultTypes: ["violations"]})).violations')
        return [(one["id"], node["html"]) for one in found for node in one["nodes"]]

    def wider_by(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def close(self) -> None:
        """Close the context."""
        self.context.close()


def paths_of(world: World, *, once: bool = False) -> list[str]:
    """Return the path of each page that shows something, without the pages of acts and of findings.

    `once`: a page that shows one thing comes with one thing only.
    """
    names = {
        "/console/subscriptions/{name}": ["warehouse", "crm", "accounting"],
        "/console/producer-groups/{name}": ["shop", "gone-shop"],
    }
    keys = ("order-1030", "order-1031", "order-1033", "photo-1")
    found = [f"/console/transactions/{world.ids[key]}" for key in keys[: 1 if once else None]]
    for page in PAGES:
        is_act = "/do/" in page.path or page.path.startswith("/console/sign-in")
        if page.method != "GET" or is_act or page.path in _OTHER:
            continue
        filled = [page.path.replace("{name}", name) for name in names.get(page.path, [])[: 1 if once else None]]
        found += filled or ([] if "{" in page.path else [page.path])
    return found
