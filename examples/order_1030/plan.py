"""PURE: what befalls each order. The same orders meet the same in every way, each way's own steps in turn."""

from dataclasses import dataclass

FIRST = 1030
# Orders that are placed at the same time. In every other group one meets the service's death, so all of them may.
AT_ONCE = 4


@dataclass(frozen=True)
class Placed:
    """One order or transfer and what befalls it.

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
    """Return how many orders it takes to die once at each of these steps."""
    return 2 * AT_ONCE * len(steps)


def plan(count: int, steps: tuple[str, ...], consumers: tuple[str, ...]) -> list[list[Placed]]:
    """Return orders in the groups that are placed at once. Raises ValueError if they are too few."""
    if count < fewest(steps):
        raise ValueError(f"it takes {fewest(steps)} orders to die at each of {len(steps)} steps")
    groups = -(-count // AT_ONCE)
    orders = [_placed(index, groups // len(consumers), steps, consumers) for index in range(count)]
    return [orders[start : start + AT_ONCE] for start in range(0, count, AT_ONCE)]


def _placed(index: int, span: int, steps: tuple[str, ...], consumers: tuple[str, ...]) -> Placed:
    """Return an order by its place. Each consumer is away once, for half of its span of groups."""
    group, place = divmod(index, AT_ONCE)
    absent, since = divmod(group, span)
    away = consumers[absent] if place == 0 and absent < len(consumers) else None
    # What else befalls an order befalls those at even places, while the service dies on odd ones.
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
