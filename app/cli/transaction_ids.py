"""Read the TRANSACTION_ID of a command before the service is called."""

import re
import shlex

from app.cli.api_client import NOT_TEXT
from app.cli.errors import WRONG_USAGE, Refusal
from app.ids import parse_id

# The API takes this form as well.
_without_dashes = re.compile("[0-9a-fA-F]{32}").fullmatch


def transaction_id_of(given: str, *, or_message: bool = False) -> str:
    """Return a transaction's id. With `or_message` a message's id stands for its transaction.

    Raises Refusal for any other text.
    """
    if _without_dashes(given):
        return given
    found = parse_id(given)
    if found is None:
        if not _is_text(given):
            raise Refusal(NOT_TEXT, code=WRONG_USAGE)
        raise Refusal(
            f"`{given}` is not a transaction id. To find what it names:\n  halfnote search {_argument(given)}",
            code=WRONG_USAGE,
        )
    transaction_id, position = found
    if position is not None and not or_message:
        raise Refusal(
            f"`{given}` is the id of a message. Nothing was done. The id of its transaction:\n  {transaction_id}",
            code=WRONG_USAGE,
        )
    return str(transaction_id)


def _argument(given: str) -> str:
    return f"-- {shlex.quote(given)}" if given.startswith("-") else shlex.quote(given)


def _is_text(given: str) -> bool:
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True
