"""What a process has to know of keys and topics, which admins change while it runs."""

from datetime import datetime

from app.runtime import Runtime
from app.store import api_keys, topics


async def follow_keys(runtime: Runtime, now: datetime) -> None:
    """Know all keys, if any was changed since they were last read."""
    async with runtime.database.connection() as connection:
        version = await api_keys.version(connection, api_keys.CHANGED)
        # Keys that nobody changed are read once; a database restored to an earlier time has another version.
        if runtime.keys_read and version == runtime.gate.version:
            return
        runtime.gate.learn(await api_keys.known(connection, now), version)
        runtime.keys_read = True


async def follow_topics(runtime: Runtime) -> None:
    """Know all declared topics, if any was changed since they were last read."""
    async with runtime.database.connection() as connection:
        version = await api_keys.version(connection, topics.CHANGED)
        if runtime.declared is not None and version == runtime.declared_version:
            return
        runtime.declared, runtime.declared_version = await topics.declared(connection), version


async def follow(runtime: Runtime, now: datetime) -> None:
    """Know what this process has to know of keys and topics before it answers."""
    if not runtime.gate.off:
        await follow_keys(runtime, now)
    if runtime.settings.topics == "declared":
        await follow_topics(runtime)
