"""Records people's changes of days and archives, in the same audit table as their HTTP requests."""

import getpass

from psycopg.types.json import Jsonb

from spark.postgres.connections import Connection

# The time is the database's clock, as in every audit row.
ADD = """
insert into audit (at, actor, what, target, detail)
values (clock_timestamp(), %(actor)s, %(what)s, %(target)s, %(detail)s)
"""


def user() -> str:
    """Return the user of this machine that runs the program."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown user"


def record(connection: Connection, what: str, target: object, **detail: str | None) -> None:
    """Record an action of the user that runs the program, in the database transaction of the change.

    None values are left out of `detail`, which has no bodies and no secrets.
    """
    kept = {name: value for name, value in detail.items() if value is not None}
    actor = f"{user()} (command line)"
    connection.execute(ADD, {"actor": actor, "what": what, "target": str(target), "detail": Jsonb(kept)})
