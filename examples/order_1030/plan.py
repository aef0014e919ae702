"""PURE: the faults of each order. The orders have the same faults in all ways, at the steps of each way."""

from dataclasses import dataclass

FIRST = 1030
# Orders are placed in groups of this size. In every other group, one order kills the service, which may affect the
# others.
AT_ONCE = 4


@dataclass(frozen=True)
class Placed:
    """One order or transfer and its faults.

    `dies_at`: the step at which its service is killed. `too_much`: the database refuses what is to be written;
    `refused_by_commit`: only the commit does. `unanswered_by`: the consumer that dies after its commit, before its
    answer. `down`, `up`: consumers that are killed before it, or started again. `without_account`: billing refuses it.
    """

    number: int
    dies_at: str | None = None
    too_much: bool = False
    refused_by_commit: bool = False
    unanswered_by: str | None = None
    down: str | None = None
    up: str | None = None
    without_account: bool = False


def fewest(steps: tuple[str, ...]) -> int:
    """Return the least number of orders that lets the service die once at each of these steps."""
    return 2 * AT_ONCE * len(steps)


def plan(count: int, steps: tuple[str, ...], consumers: tuple[str, ...]) -> list[list[Placed]]:
    """Return the orders in groups that are placed at once. Raises ValueError if there are too few orders."""
    if count < fewest(steps):
        raise ValueError(f"{count} orders are too few for {len(steps)} steps: use at least {fewest(steps)}")
    groups = -(-count // AT_ONCE)
    orders = [_placed(index, groups // len(consumers), steps, consumers) for index in range(count)]
    return [orders[start : start + AT_ONCE] for start in range(0, count, AT_ONCE)]


def _placed(index: int, span: int, steps: tuple[str, ...], consumers: tuple[str, ...]) -> Placed:
    """Return an order by its position. Each consumer is down once, for half of its span of groups."""
    group, place = divmod(index, AT_ONCE)
    absent, since = divmod(group, span)
    away = consumers[absent] if place == 0 and absent < len(consumers) else None
    # The service dies at odd positions. Other faults affect orders at even positions.
    return Placed(
        FIRST + index,
        dies_at=steps[group // 2 % len(steps)] if group % 2 == 1 and place == 1 else None,
        too_much=index % 20 == 8,
        refused_by_commit=index % 30 == 22,
        unanswered_by=consumers[index // 10 % len(consumers)] if index % 10 == 6 else None,
        down=away if since == 0 else None,
        up=away if since == span // 2 else None,
        without_account=index % 40 == 14,
    )
