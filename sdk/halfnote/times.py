"""Read times in Halfnote's format."""

import re
from datetime import datetime

_fraction = re.compile(r"\.(\d+)")


def instant(text: str) -> datetime:
    """Return a time of RFC 3339; older Pythons read neither `Z` nor any number of decimals. Raises ValueError."""
    normal = _fraction.sub(lambda found: "." + found[1][:6].ljust(6, "0"), text, count=1)
    return datetime.fromisoformat(normal[:-1] + "+00:00" if normal[-1:] in "Zz" else normal)
