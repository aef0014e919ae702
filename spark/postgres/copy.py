"""Read tables in this process with binary COPY, through Arrow into Parquet, for executors on this machine.

JDBC makes an object of each value, and Spark's writer processes them one by one: 4.2 s of CPU time for a million
halves. COPY takes 1.5 s. Neither figure includes Postgres (docs/decisions/0027).
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow.parquet as pq
from adbc_driver_manager import Error as AdbcError
from pyarrow import ArrowException

from spark.postgres.connections import Snapshot

# The exceptions of a read.
FAILURES = (AdbcError, ArrowException, OSError)

# The service comes first: while other sessions are active in the database, a reader pauses after each range for this
# multiple of the time that the range took (docs/decisions/0027 has the cost for both). Between two requests of a busy
# service the database is idle for some milliseconds; with an idle service, for hundreds.
RESTS = 3.0
OTHERS_AT_WORK = """select exists (select from pg_stat_activity where datname = current_database()
  and backend_type = 'client backend' and not starts_with(application_name, 'halfnote proof')
  and (state = 'active' or state_change > clock_timestamp() - interval '20 ms'))"""
# Rows are selected by these columns only, so a file needs no other statistics.
ASKED_BY = ["offset", "transaction_id"]


def write_copied(
    snapshot: Snapshot, queries: Sequence[str], directory: str, unlike: Sequence[str], abreast: int
) -> int:
    """Write the result of each query to a separate Parquet file, several at a time; return the number of rows.

    `unlike`: columns that get no dictionary. Raises FAILURES.
    """
    if not queries:
        return 0
    place = Path(directory)
    place.mkdir(parents=True)
    parts: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for part in enumerate(queries):
        parts.put(part)
    stop = threading.Event()

    def work() -> int:
        rows = 0
        with snapshot.readers.cursor() as cursor:
            while not stop.is_set():
                try:
                    number, query = parts.get_nowait()
                except Empty:
                    break
                began = time.monotonic()
                rows += _copy(cursor, query, place / f"part-{number:05}.parquet", unlike, stop)
                took_s = time.monotonic() - began
                if others_are_at_work(cursor):
                    stop.wait(RESTS * took_s)
        return rows

    readers = min(abreast, len(queries))
    with ThreadPoolExecutor(readers) as pool:
        running = [pool.submit(work) for _ in range(readers)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            # A reader that still runs after another failed, or after the run was ended, checks `stop` after each batch.
            stop.set()
        return sum(reader.result() for reader in running)


def _copy(cursor: Any, query: str, file: Path, unlike: Sequence[str], stop: threading.Event) -> int:
    rows = 0
    cursor.execute(query)
    with cursor.fetch_record_batch() as batches:
        like = [name for name in batches.schema.names if name not in unlike]
        # Not LZ4: Spark refuses some pages that pyarrow writes with it ("all input must be consumed").
        with pq.ParquetWriter(
            file, batches.schema, compression="snappy", use_dictionary=like, write_statistics=ASKED_BY
        ) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
                if stop.is_set():
                    break
    return rows


def others_are_at_work(cursor: Any) -> bool:
    """Return whether other sessions are active in the database."""
    # Without this the whole database transaction would see its first statistics snapshot.
    cursor.execute("select pg_stat_clear_snapshot()::text")
    cursor.execute(OTHERS_AT_WORK)
    return bool(cursor.fetchone()[0])
