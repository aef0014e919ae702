"""When a loop is late: one rule for `/readyz` and for the metric that an alert watches."""

# A loop is late when its last turn is longer ago than this plus three of its pauses.
TURN_WITHIN_S = 60.0


def is_late(age_s: float, every_s: float) -> bool:
    """Return whether a loop with pauses of `every_s` seconds, whose last turn is `age_s` seconds ago, is late."""
    return age_s > TURN_WITHIN_S + 3 * every_s
