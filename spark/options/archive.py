"""The options of `halfnote archive`."""

from argparse import ArgumentParser

from spark.options import common


def parser() -> ArgumentParser:
    """Return the parser."""
    made = common.parser("halfnote archive", "Copy settled days to the archive, as Parquet.")
    made.add_argument("--archive", metavar="URL", help=f"directory or URL of the archive; default: {common.ARCHIVE}")
    made.add_argument(
        "--day", type=common.day, action="append", default=[], help="archive this day, final or not; repeatable"
    )
    bodies = made.add_mutually_exclusive_group()
    bodies.add_argument(
        "--bodies", action="store_true", default=None, help="archive the messages' bodies (the default)"
    )
    bodies.add_argument(
        "--no-bodies", dest="bodies", action="store_false", help=f"archive only their digests; also {common.BODIES}"
    )
    made.add_argument(
        "--keep-s",
        type=common.given_keep_s,
        metavar="S",
        help=f"remove archived days that ended more than S seconds ago, a day to 100 years; default: {common.KEEP_S}",
    )
    made.add_argument("--adopt", action="store_true", help="take over the archive of another database")
    made.add_argument(
        "--moved", action="store_true", help="record that archives were moved here, from the addresses the database has"
    )
    made.add_argument(
        "--earlier-locations",
        action="store_true",
        help="also remove what is not needed, and days past their retention, where archives were written before",
    )
    made.add_argument("--verify", action="store_true", help="only read archived days and compare them; write nothing")
    return made
