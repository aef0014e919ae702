"""The answer of `GET /workers`."""

from datetime import datetime

from pydantic import Field

from app.schemas.transactions import AT, Shown


class ShardPlace(Shown):
    """A shard of an active subscription."""

    subscription: str = Field(examples=["mailer"])
    shard: int = Field(description="from 0", examples=[0])
    shards: int = Field(description="shards of the subscription", examples=[1])


class ShardHeld(ShardPlace):
    """A shard that a worker delivers."""

    held_since: datetime | None = Field(
        description="when the worker took it; null: by a worker of an earlier version", examples=[AT]
    )
    held_until: datetime = Field(description="when its lease ends, unless the worker renews it", examples=[AT])


class WorkerShown(Shown):
    """A process that holds leases."""

    worker: str = Field(examples=["shop-1/4711"])
    present_until: datetime | None = Field(
        description="when it counts as gone, unless it renews its presence; null if it is no relay worker",
        examples=[AT],
    )
    shards: list[ShardHeld]
    tasks: list[str] = Field(description="other work that one process does at a time", examples=[["routing"]])


class Workers(Shown):
    """The processes that hold leases now, by name, and what no worker holds."""

    items: list[WorkerShown]
    unheld: list[ShardPlace] = Field(
        description="shards of active subscriptions that no worker delivers, at most 1,000. A new one is taken within "
        "seconds"
    )
