"""The options of `halfnote restore`."""

from argparse import ArgumentParser

from spark.options import common


def parser() -> ArgumentParser:
    """Return the parser."""
    made = common.parser("halfnote restore", "Restore an archived day into a separate schema, to query it.")
    made.add_argument("day", type=common.day, metavar="DAY", help="a day like 2026-11-10")
    made.add_argument("--drop", action="store_true", help="drop the restored schema")
    return made
