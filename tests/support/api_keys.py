"""API keys for tests, created as the service creates them."""

from typing import Any

from app.operations.api_keys import make_key
from app.permissions import Caller, Role
from app.runtime.live_settings import follow
from app.runtime.state import Runtime
from app.schemas.api_keys import ApiKeyNew

TESTER = Caller(None, name="tests")


async def make(runtime: Runtime, role: Role, **fields: Any) -> str:
    """Return a new key that this process has loaded."""
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        fields_of_key = ApiKeyNew.model_validate({"name": f"a {role}", "role": role, **fields})
        key, _ = await make_key(connection, TESTER, fields_of_key, now)
    await follow(runtime, now)
    return key


def bearer(key: str) -> dict[str, str]:
    """Return the header that carries a key."""
    return {"authorization": f"Bearer {key}"}
