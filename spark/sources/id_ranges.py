"""Divides a day into ranges of ids with about as many half messages each.

All tables are read by the same ranges, so that the rows of a transaction are in the files of one range. The ids come
from a sample of the half messages, because a day's hours differ.
"""

from uuid import UUID

from spark import schemas
from spark.postgres.connections import Day, Snapshot, partition_name

# The pages of one range in the largest table, which a connection reads in some hundred milliseconds.
PAGES_AT_ONCE = 4096
# So many halves are looked at for each range.
SAMPLES = 16
# A TID scan; a page whose first row is gone adds none.
SAMPLED = "select transaction_id from {half} where ctid = any(%s::tid[])"


def id_ranges(snapshot: Snapshot, day: Day) -> tuple[str, ...]:
    """Return conditions that divide the rows of each of the day's own tables; each is a scan by primary key."""
    pages = {table: snapshot.pages(partition_name(table, day.day)) for table in schemas.BIG}
    parts = -(-max(pages.values()) // PAGES_AT_ONCE)
    found = borders(snapshot, day, pages["half"], parts) if parts > 1 else []
    from_ = ["", *(f"transaction_id >= '{border}'" for border in found)]
    to = [*(f"transaction_id < '{border}'" for border in found), ""]
    return tuple(" and ".join(filter(None, both)) or "true" for both in zip(from_, to, strict=True))


def borders(snapshot: Snapshot, day: Day, pages: int, parts: int) -> list[UUID]:
    """Return ids that divide a day's half messages, on so many `pages`, into parts."""
    step = max(1, pages // (SAMPLES * parts))
    places = [f"({page},1)" for page in range(0, pages, step)]
    statement = SAMPLED.format(half=partition_name("half", day.day))
    ids = sorted(row["transaction_id"] for row in snapshot.rows(statement, [places]))
    return sorted({ids[len(ids) * part // parts] for part in range(1, parts)}) if ids else []
