"""Removes one message's body from the archive for good; the message's row and the body's digest stay.

    halfnote redact 019a9f1c-1030-7b1e-8f00-1030a1030a10-0 --reason 'erasure request 17'

The file that contains the body is rewritten without it, the day's row in Postgres gets the new manifest, and the old
file is removed. A body that is still in Postgres is refused: upkeep must have removed its day.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psycopg
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from spark.archive import records
from spark.archive.addresses import root_of
from spark.archive.cleanup import (
    DAY,
    attempts,
    finish_redaction,
    finish_redactions,
    refuse_without_halves,
    write_manifest,
)
from spark.archive.files import sync
from spark.archive.layout import NAMED_AT_MOST, body_problems, entries, read, small_batches
from spark.archive.owner import is_same_storage, own_roots
from spark.archive.records import ArchivedDay, manifest_in
from spark.archive.removal import is_named
from spark.archive.writer import parquet_options
from spark.engine.filesystem import FAILURES, Files, files_for, name_of, normal
from spark.engine.niceness import stand_behind
from spark.engine.session import session
from spark.errors import RunFailedError
from spark.jobs.archive import CONF
from spark.jobs.restore import is_restored, schema_of
from spark.manifest import COLUMNS, TableManifest
from spark.options import redact as options
from spark.options.common import parsed
from spark.postgres import audit, connections
from spark.postgres.connections import Connection
from spark.sources.failures import root_cause

DONE, FAILED = 0, 1

# Rows that stay longer than their day have copies of bodies. By primary key ranges of small tables.
COPIES = """
select 'dead letter' as what, s.name from dead_letter d join subscription s using (subscription_id)
where d.transaction_id = %(id)s and d.position = %(position)s and d.body is not null
union all
select 'delivery that is tried again', s.name from delivery_retry d join subscription s using (subscription_id)
where d.transaction_id = %(id)s and d.position = %(position)s and d.body is not null
order by 1, 2
"""

# The row of `reissue` leaves with the day of its transaction; the audit keeps it longer. By the primary key and
# audit_target.
REISSUES = """
select reissued_as from reissue where transaction_id = %(id)s
union
select (detail ->> 'reissued_as')::uuid from audit
where target = %(target)s and what = 'transaction.reissue' and detail ? 'reissued_as'
"""


class Message(NamedTuple):
    """A message's transaction and position."""

    transaction_id: UUID
    position: int

    def __str__(self) -> str:
        return f"{self.transaction_id}-{self.position}"


class UnfinishedError(Exception):
    """The redaction is on record, or may be, and a file with the body may still exist."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0: done, now or earlier; 1: it failed; 2: wrong usage."""
    parser = options.parser()
    given = parsed(parser, argv)
    wanted = [Message(*_parsed(parser, text)) for text in given.message_id]
    record = {"actor": given.actor or audit.user(), "reason": given.reason}
    done: list[Message] = []
    try:
        connection = connections.connect(given.url)
        with records.archive_lock(connection):
            days = {message: _day_of(connection, message) for message in wanted}
            spark = session(given.master, jdbc=True, **CONF)
            unfinished = finish_redactions(connection, files_for(spark))
            known = own_roots(connection, files_for(spark))
            for root, why in known.unreachable.items():
                print(f"{root} cannot be looked at, and may have the body: {why}", file=sys.stderr)
            for message, day in days.items():
                found = records.day_of(connection, day)
                if "rubbish" in manifest_in(found):
                    raise RunFailedError(" ".join(unfinished))
                refuse_without_halves(files_for(spark), found)
                _refuse_attempts(files_for(spark), found, known.owned)
                _refuse_reissues(spark, connection, found, message, wanted)
            for message, day in days.items():
                now = redact(spark, connection, records.day_of(connection, day), message, record)
                print(f"{message} is redacted." if now else f"{message} was redacted before.")
                done.append(message)
    except UnfinishedError as error:
        print(error, file=sys.stderr)
        return FAILED
    except (RunFailedError, *FAILURES, psycopg.Error) as error:
        more = " more" if done else ""
        print(f"Nothing{more} was redacted: {root_cause(str(error))}", file=sys.stderr)
        return FAILED
    return DONE


def _parsed(parser: ArgumentParser, text: str) -> tuple[UUID, int]:
    found = parsed_id(text)
    if found is None:
        parser.error(f"{text!r} is not a message id like 019a9f1c-1030-7b1e-8f00-1030a1030a10-0")
    return found


def parsed_id(text: str) -> tuple[UUID, int] | None:
    """Return the transaction and position of a message id, or None if the text is not a message id."""
    head, dash, tail = text.rpartition("-")
    if not dash or not tail.isascii() or not tail.isdigit() or len(tail) > 3:
        return None
    try:
        return UUID(head), int(tail)
    except ValueError:
        return None


def redact(
    spark: SparkSession,
    connection: Connection,
    day: ArchivedDay,
    message: Message,
    record: Mapping[str, str],
) -> bool:
    """Remove a body from a day's archive; False if it was removed before. `record`: actor and reason.

    Raises RunFailedError; the archive is then unchanged, and the next archive or redact removes the partial files.
    Raises UnfinishedError if a later step failed, or if its outcome is unknown.
    """
    files = files_for(spark)
    if _is_redacted(day, message):
        return False
    old = _file_of(spark, day, message)
    aside, name = f"redact-{uuid4()}", f"half/redacted-{uuid4()}.zstd.parquet"
    # Record the new names before any file is written, so that an interruption leaves only known files.
    day = records.redescribe(connection, day, {**manifest_in(day), "rubbish": [aside, name]})
    write_manifest(files, day, manifest_in(day))
    _write_without(spark, files, day, old, aside, name, _is_it(message))
    (new,) = entries(spark, files, str(day.archive), "half", [name])
    if TableManifest.of(new) != TableManifest.of(old):
        raise RunFailedError("The rewritten file has other rows than the old one. The archive still has the body.")
    entry = {"message_id": str(message), "at": datetime.now(UTC).isoformat(), **record}
    described = {**_described(manifest_in(day), old, new, entry), "rubbish": [aside, old["path"]]}
    wrong = body_problems(spark, str(day.archive), {**described, "tables": {"half": {"files": [new]}}})
    if wrong:
        raise RunFailedError(f"The rewritten file is wrong: {'; '.join(wrong)}. The archive still has the body.")
    sync([f"{day.archive}/{name}"])
    try:
        with connection.transaction():
            day = records.redescribe(connection, day, described)
            audit.record(connection, "archive.redact", message, **record)
    except psycopg.OperationalError as error:
        raise UnfinishedError(
            f"The database did not answer, so it is not known whether {message} is redacted. Run the command again: "
            f"{root_cause(str(error))}"
        ) from error
    try:
        finish_redaction(connection, files, day)
    except (RunFailedError, *FAILURES) as error:
        raise UnfinishedError(
            f"The body is taken out of the archive of {day.day}, but a file that still has it could not be removed: "
            f"{root_cause(str(error))}. The next halfnote archive or redact tries again."
        ) from error
    return True


def _day_of(connection: Connection, message: Message) -> date:
    """Return the message's day. Raises RunFailedError if its body is also elsewhere than in the archive."""
    day = _recorded_day(connection, message)
    if day is None:
        raise RunFailedError("The database has no record of the message's day.")
    if day.state != "gone":
        raise RunFailedError(
            f"The message is still in Postgres, where halves never change, until {day.day} is removed "
            "(HALFNOTE_RETENTION_S after its end). Redact it then."
        )
    if day.archive is None or day.archive_manifest is None:
        raise RunFailedError(f"{day.day} was removed and is not archived, so the message does not exist any more.")
    if not day.archive_manifest["bodies"]:
        raise RunFailedError(f"The archive of {day.day} has no bodies.")
    _refuse_copies(connection, day.day, message)
    return day.day


def _recorded_day(connection: Connection, message: Message) -> ArchivedDay | None:
    found = [day for day in records.days(connection) if day.low <= message.transaction_id < day.high]
    return found[0] if found else None


def _is_redacted(day: ArchivedDay, message: Message) -> bool:
    return any(one["message_id"] == str(message) for one in manifest_in(day)["redacted"])


def _refuse_copies(connection: Connection, day: date, message: Message) -> None:
    if is_restored(connection, day):
        raise RunFailedError(f"{schema_of(day)} also has the body. Drop it first: halfnote restore {day} --drop")
    copies = connection.execute(COPIES, {"id": message.transaction_id, "position": message.position}).fetchall()
    if copies:
        named = ", ".join(f"a {copy['what']} of {copy['name']}" for copy in copies[:NAMED_AT_MOST])
        raise RunFailedError(f"Postgres has copies of the body: {named}. Drop or deliver them first.")


def _refuse_attempts(files: Files, day: ArchivedDay, owned: Sequence[str]) -> None:
    """Raise RunFailedError if the archive has another attempt of the day, which may have the body.

    It may be at the location before a change of HALFNOTE_ARCHIVE, or the copy that a move left there. `owned`: the
    locations of the database.
    """
    own, root = normal(str(day.archive)), normal(root_of(str(day.archive)))
    others = [
        place
        for place in {root, *owned}
        if place == root or not files.exists(f"{place}/{DAY}{day.day}") or not is_same_storage(files, root, place)
    ]
    others = [place for one in sorted(others) for place in attempts(files, one, day.day) if normal(place) != own]
    copies = [place for place in others if is_named(day, name_of(place))]
    if copies:
        raise RunFailedError(
            f"{copies[0]} is a copy of the day's archive, and may have the body. Remove it: the database has the day "
            f"at {day.archive}."
        )
    if others:
        raise RunFailedError(
            f"The archive may have the body a second time, at {others[0]}. Run halfnote archive, which removes what is "
            'not needed and names what stays; docs/archive.md, "What is removed", says what to do with that.'
        )


def _refuse_reissues(
    spark: SparkSession, connection: Connection, day: ArchivedDay, message: Message, wanted: Sequence[Message]
) -> None:
    """Raise RunFailedError if the reissue of the message, or the message that it reissues, still has the same body."""
    of = read(spark, str(day.archive), manifest_in(day), "half").where(_is_it(message)).select("reissued_from")
    others = [UUID(row["reissued_from"]) for row in of.collect() if row["reissued_from"] is not None]
    reissues = connection.execute(REISSUES, {"id": message.transaction_id, "target": str(message.transaction_id)})
    others += [row["reissued_as"] for row in reissues.fetchall()]
    for other in (Message(one, message.position) for one in others):
        if other not in wanted and _has_body(_recorded_day(connection, other), other):
            raise RunFailedError(
                f"{other} has the same body, because one of the two is the reissue of the other. Name both in one "
                "command, once both days are removed from Postgres."
            )


def _has_body(day: ArchivedDay | None, message: Message) -> bool:
    """Return whether a message has its body, in Postgres or in the archive."""
    if day is None or day.state != "gone":
        return day is not None
    return day.archive_manifest is not None and day.archive_manifest["bodies"] and not _is_redacted(day, message)


def _is_it(message: Message) -> Column:
    return (F.col("transaction_id") == str(message.transaction_id)) & (F.col("position") == message.position)


def _file_of(spark: SparkSession, day: ArchivedDay, message: Message) -> dict[str, Any]:
    """Return the manifest's entry of the file that has a message. Raises RunFailedError if no file has it."""
    described = manifest_in(day)
    rows = read(spark, str(day.archive), described, "half").where(_is_it(message))
    urls = [row["file"] for row in rows.select(F.input_file_name().alias("file")).collect()]
    if not urls:
        raise RunFailedError(f"The archive of {day.day} does not have the message.")
    listed: list[dict[str, Any]] = described["tables"]["half"]["files"]
    return next(file for file in listed if name_of(file["path"]) == name_of(urls[0]))


def _write_without(
    spark: SparkSession,
    files: Files,
    day: ArchivedDay,
    old: Mapping[str, Any],
    aside: str,
    name: str,
    is_it: Column,
) -> None:
    """Rewrite a file without the body of one row."""
    place, largest = f"{day.archive}/{aside}", manifest_in(day)["largest_body"]
    only_it = {"tables": {"half": {"files": [old]}}}
    with small_batches(spark, largest):
        rows = read(spark, str(day.archive), only_it, "half").withColumn("body", F.when(~is_it, F.col("body")))
        in_order = rows.coalesce(1).sortWithinPartitions("transaction_id", "position")
        in_order.write.options(**parquet_options(COLUMNS["half"], largest)).parquet(place)
    (written,) = [one for one in files.children(place) if one.endswith(".parquet")]
    files.replace(f"{day.archive}/{name}", by=written)


def _described(
    before: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest with one file replaced and one more redaction; totals stay."""
    half = before["tables"]["half"]
    listed = [new if file["path"] == old["path"] else file for file in half["files"]]
    tables = {**before["tables"], "half": {**half, "files": listed}}
    return {**before, "tables": tables, "redacted": [*before["redacted"], entry]}


if __name__ == "__main__":
    stand_behind()
    sys.exit(main())
