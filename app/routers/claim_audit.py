"""The audit of what admins do with messages of a subscription that consumers claim from.

Consumers' keys leave no rows: a message that a consumer settles has its receipt or its attempts.
"""

from collections.abc import Sequence

from app.database.connection import Connection
from app.ids import message_id
from app.operations.audit import audit_entry
from app.permissions import Caller, Role
from app.runtime.state import Runtime
from app.store.admin.audit import record
from app.store.pull.claims import HeldMessage
from app.store.relay.log import Outgoing

# A row names so many of the messages of a request, and says how many they are.
IDS_NOTED = 10


async def note_act(
    runtime: Runtime,
    connection: Connection,
    caller: Caller,
    what: str,
    name: str,
    messages: Sequence[HeldMessage | Outgoing],
    reason: str | None = None,
) -> None:
    """Write the row of an admin's request about messages of the subscription `name`; none if it is about none."""
    if caller.role is not Role.ADMIN or not messages:
        return
    ids = [message_id(one.transaction_id, one.position) for one in messages[:IDS_NOTED]]
    act = audit_entry(caller, what, name, messages=len(messages), message_ids=ids, reason=reason)
    await record(connection, act, runtime.clock.now())


async def note_act_first(
    runtime: Runtime, caller: Caller, what: str, name: str, held: Sequence[HeldMessage], reason: str | None = None
) -> None:
    """Write the row in a commit of its own, before the statements that settle what is held."""
    if caller.role is Role.ADMIN:
        async with runtime.claim_connections.connection() as connection:
            await note_act(runtime, connection, caller, what, name, held, reason)
