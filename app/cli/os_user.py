"""The person who runs a command on the database, for the audit."""

import getpass

from app.permissions import Caller


def person() -> Caller:
    """Return the operating system's user who runs the command. The user owns the database and may do everything."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown user"
    return Caller(None, name=f"{user} (command line)")
