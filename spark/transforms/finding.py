"""The rows that every rule returns: schemas.FINDING."""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType

from spark.schemas import FINDING

# The most transactions that a finding of a refused verdict names.
NAMED = 10


def findings(found: DataFrame, day: date, kind: str, subject: Column | str, *detail: Column | str) -> DataFrame:
    """Return one finding a row about `subject`; `detail` names the columns of its JSON object.

    FINDING's other columns are kept where `found` has them.
    """
    detail_json = F.to_json(F.struct(*detail)) if detail else F.lit("{}")
    subject = F.col(subject) if isinstance(subject, str) else subject
    given = {"day": F.lit(day), "kind": F.lit(kind), "subject": subject, "detail": detail_json}
    # A text is one call of Java, and every rule has these columns.
    has = set(found.columns)
    columns = (
        given[field.name].cast(field.dataType).alias(field.name)
        if field.name in given
        else F.expr(
            f"cast({field.name if field.name in has else 'null'} as {field.dataType.simpleString()}) as {field.name}"
        )
        for field in FINDING.fields
    )
    return found.select(*columns)


def of_rows(spark: SparkSession, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return findings that the driver made; each row's `detail` is an object, and its columns may be left out."""
    made = [dict(row) | {"detail": json.dumps(row["detail"])} for row in rows]
    # As JSON: rows made in Python would need Python on the executors.
    as_rows = F.from_json(F.lit(json.dumps(made)), ArrayType(FINDING))
    return spark.range(1).select(F.inline(as_rows))


def message_id() -> Column:
    """The id of the message of `transaction_id` and `position`."""
    return F.concat_ws("-", "transaction_id", "position")


def delivery_id() -> Column:
    """The subject of a finding about one delivery: the message and the subscription."""
    return F.concat_ws(":", message_id(), "subscription_id")
