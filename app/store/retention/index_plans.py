"""Plans for the statements that go through a day in steps."""

from app.database.connection import Connection


async def probe(connection: Connection) -> None:
    """Let this database transaction read its next rows by the order of an index, and look up others by key.

    A plan is kept for later steps. Made for few rows, it would read all that the earlier steps wrote; made for any day,
    it would read and sort all rows of the day in each step.
    """
    await connection.execute("set local enable_seqscan = off; set local enable_sort = off")
