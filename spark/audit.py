"""What people do to days and their archive, on the same record as what they do over HTTP."""

import getpass

from psycopg.types.json import Jsonb

from spark.database import Connection

# By the database's own clock, as every act.
ADD = """
insert into audit (at, actor, what, target, detail)
values (clock_timestamp(), %(actor)s, %(what)s, %(target)s, %(detail)s)
"""


def user() -> str:
    """Return the user of this machine that runs the program."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody"


def record(connection: Connection, what: str, target: object, **detail: str | None) -> None:
    """Write down what is done, by whoever runs the program; belongs in the database transaction of the change.

    What is None is left out of `detail`, which has no bodies and secrets.
    """
    kept = {name: value for name, value in detail.items() if value is not None}
    actor = f"{user()} (command line)"
    connection.execute(ADD, {"actor": actor, "what": what, "target": str(target), "detail": Jsonb(kept)})
