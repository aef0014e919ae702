"""Who uses the command line beside the database, for the audit."""

import getpass

from app.access import Caller


def person() -> Caller:
    """Return the user of this machine that runs the command; they may do everything, since the database is theirs."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return Caller(None, name=f"{user} (command line)")
