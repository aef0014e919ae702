"""The time in the id that RocketMQ's remoting clients give a message.

The id has in hexadecimal: address, process, class loader, milliseconds since the beginning of the client's month, and
a number. The client's time zone is not in it, but each zone is off by whole quarters of an hour.
"""

import re
from datetime import UTC, datetime

QUARTER_MS = 15 * 60 * 1000
# How far a clock may be set back between the id of a message and its send.
SET_BACK_MS = 60 * 1000
_id = re.compile(r"[0-9A-Fa-f]{20}(?:[0-9A-Fa-f]{24})?([0-9A-Fa-f]{8})[0-9A-Fa-f]{4}").fullmatch


def made_at(unique_key: str, sent_ms: int) -> datetime | None:
    """Return when an id was made, from the time of its client when it was sent, less than 14 minutes later.

    If the clock was set back meanwhile, that is up to a minute earlier.

    None: the id is of another form. A message that is sent again within that time has the same time.
    """
    found = _id(unique_key)
    if found is None or not 0 < sent_ms < 2**42:
        return None
    sent = datetime.fromtimestamp(sent_ms / 1000, UTC)
    month = int(sent.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()) * 1000
    later_ms = (sent_ms - month - int(found[1], 16)) % QUARTER_MS
    if later_ms >= QUARTER_MS - SET_BACK_MS:
        later_ms -= QUARTER_MS
    made_ms = sent_ms - later_ms
    return datetime.fromtimestamp(made_ms / 1000, UTC) if made_ms > 0 else None
