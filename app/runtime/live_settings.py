"""Reads the API keys and declared topics into a process. Admins change both while the process runs."""

from datetime import datetime

from app.runtime.state import Runtime
from app.store.admin import api_keys
from app.store.coordinator import topics


async def follow_keys(runtime: Runtime, now: datetime) -> None:
    """Read all keys if any key changed since the last read."""
    async with runtime.database.connection() as connection:
        version = await api_keys.version(connection, api_keys.CHANGED)
        # Unchanged keys are read once from each server that was promoted.
        if runtime.keys_read and version == runtime.authenticator.version:
            return
        runtime.authenticator.learn(await api_keys.known(connection, now), version)
        runtime.keys_read = True


async def follow_topics(runtime: Runtime) -> None:
    """Read all declared topics if any changed since the last read."""
    async with runtime.database.connection() as connection:
        version = await api_keys.version(connection, topics.CHANGED)
        if runtime.topics_read and version == runtime.declared_version:
            return
        runtime.declared, runtime.declared_version = await topics.declared(connection), version
        runtime.topics_read = True


async def follow(runtime: Runtime, now: datetime) -> None:
    """Read the keys and topics that this process needs before it answers."""
    if not runtime.authenticator.off:
        await follow_keys(runtime, now)
    if runtime.settings.topics == "declared":
        await follow_topics(runtime)
