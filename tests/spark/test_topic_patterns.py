"""The proof's match of topics and patterns is the service's, which the relay's tests compare with its SQL condition."""

from dataclasses import fields

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from app.topic_patterns import RESERVED, TopicPatterns
from spark.transforms import routes
from spark.transforms.screen.subscribers import Subscriber, Takers
from tests.support.examples import examples
from tests.support.topic_cases import topic_cases


def test_the_proof_matches_topics_as_the_service_does(spark: SparkSession) -> None:
    found = [(pattern, topic) for patterns, topic in topic_cases(examples(3000)) for pattern in patterns]
    expected = [TopicPatterns([pattern]).match(topic) for pattern, topic in found]
    fewest = examples(500)
    assert fewest < sum(expected) < len(found) - fewest
    rows = [(n, topic, pattern) for n, (pattern, topic) in enumerate(found)]
    frame = spark.createDataFrame(rows, "n int, topic string, pattern string")
    frame = frame.withColumn("matched", routes.topic_matches("topic", "pattern"))
    answers = [row.matched for row in frame.select("n", F.col("matched")).orderBy("n").collect()]
    assert [pair for pair, ours, theirs in zip(found, expected, answers, strict=True) if ours != theirs] == []
    assert routes.RESERVED == RESERVED
    in_files = [bool(Takers([taking(pattern)]).of(topic)) for pattern, topic in found]
    assert [pair for pair, ours, theirs in zip(found, expected, in_files, strict=True) if ours != theirs] == []


def taking(pattern: str) -> Subscriber:
    """Return a subscription of a pattern."""
    none = dict.fromkeys((field.name for field in fields(Subscriber)), 0)
    return Subscriber(**{**none, "topics": [pattern]})  # type: ignore[arg-type]
