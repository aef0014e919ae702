"""The options of `halfnote redact`."""

from argparse import ArgumentParser

from spark.options import common


def parser() -> ArgumentParser:
    """Return the parser."""
    made = common.parser("halfnote redact", "Remove one message's body from the archive permanently.")
    made.add_argument("message_id", metavar="MESSAGE_ID", nargs="+", help="<transaction_id>-<position>; repeatable")
    made.add_argument("--reason", required=True, help="the reason, which the manifest records")
    made.add_argument("--actor", default=None, help="the person to record; default: the name of this account")
    return made
