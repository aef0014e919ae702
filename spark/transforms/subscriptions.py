"""Each subscription by its history: what it takes now, and since when.

Only the history counts, because its rows are never changed; the service changes the table `subscription`.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

_LAST = ("name", "topics", "filters", "state", "ordered", "started_after", "deleted_at")


def subscriptions(versions: DataFrame) -> DataFrame:
    """Return one row a subscription, deleted ones too: the columns `_LAST` of its last version.

    `versions`: the frame `subscription_version`. `created_at`: the time of its first version; `matches_since`: when its
    topics and filters last changed; `state_since`: when its state last changed; `ordered_since`: when `ordered` did.
    """
    changes = {"matches": ("topics", "filters"), "entered": ("state",), "switched": ("ordered",)}
    marked = versions.withColumns(
        {name: _changed(*columns) for name, columns in changes.items()} | {"place": F.struct("at", "version_id")}
    )
    return marked.groupBy("subscription_id").agg(
        *(F.max_by(name, "place").alias(name) for name in _LAST),
        F.min("at").alias("created_at"),
        F.max("matches").alias("matches_since"),
        F.max("entered").alias("state_since"),
        F.max("switched").alias("ordered_since"),
    )


def _changed(*names: str) -> Column:
    """Return the version's time if one of the columns differs from the version before, or there is none; else null."""
    versions = Window.partitionBy("subscription_id").orderBy("at", "version_id")
    values = F.struct(*names)
    return F.when(~values.eqNullSafe(F.lag(values).over(versions)), F.col("at"))
