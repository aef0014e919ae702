"""Administration of a Kafka of the tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient


@asynccontextmanager
async def kafka_admin(url: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """Yield a client once the broker names a controller. One that has just started answers before, without any."""
    admin = AIOKafkaAdminClient(bootstrap_servers=url)
    await admin.start()
    try:
        async with asyncio.timeout(30):
            while admin._client.cluster.controller is None:
                await asyncio.sleep(0.05)
                await admin._client.force_metadata_update()
        yield admin
    finally:
        await admin.close()
