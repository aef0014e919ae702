"""The page that a person asked for before signing in. It comes back as a parameter, which anyone can have written."""

import re
from urllib.parse import urlencode

HOME = "/console"
SIGN_IN = "/console/sign-in"
SIGN_OUT = "/console/sign-out"
NEXT = "next"
# The parameter that says that a form was sent and not taken.
UNDONE = "undone"
# With the other secrets of a sign-in it must fit into a cookie.
_LENGTH_MAX = 1000
# What `Visit.here` writes: pages of the console with their queries. No backslash, no control character, no quote, and
# the path begins with a segment of this service, so that no browser reads a host in it.
_PAGE = re.compile(r"/console(?:/[A-Za-z0-9._~%:@!$&()*+,;=-]+)*(?:\?[A-Za-z0-9._~%:@!$&()*+,;=/?-]*)?").fullmatch
# Pages that sign in or out, or that show nothing.
_NOT_PAGES = (SIGN_IN, SIGN_OUT, "/console/static", "/console/events")


def asked_page(text: str | None) -> str:
    """Return the page that a parameter names if it is one of the console; otherwise the first page."""
    if not text or len(text) > _LENGTH_MAX or _PAGE(text) is None:
        return HOME
    path = text.partition("?")[0]
    is_page = not any(path == one or path.startswith(f"{one}/") for one in _NOT_PAGES)
    # Browsers resolve these segments, so the path would be another one.
    return text if is_page and not _has_dots(path) else HOME


def sign_in_of(page: str, path: str = SIGN_IN, *, undone: bool = False) -> str:
    """Return the URL of the sign-in that leads to a page. `undone`: it says that the form of the page was not taken."""
    asked = {} if asked_page(page) == HOME else {NEXT: page}
    if undone:
        asked[UNDONE] = "1"
    return f"{path}?{urlencode(asked)}" if asked else path


def _has_dots(path: str) -> bool:
    return any(segment.lower().replace("%2e", ".") in (".", "..") for segment in path.split("/"))
