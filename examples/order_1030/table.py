"""The table that is printed at the end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from examples.order_1030.acts import Outcome
from examples.order_1030.bank import AMOUNT
from examples.order_1030.slow_act import Slowness
from examples.order_1030.ways import Way

LEGEND = """\
lost: the order is in the shop's database, and a consumer has no entry for it.
invented: a consumer has an entry for an order that is not in the database.
processed twice: a consumer has several entries for an order.
cancellations by hand: entries for invented orders, and repeated entries, which a person has to cancel.
waiting for a person: billing refused the order permanently; then the account was opened, and it was redelivered."""


@dataclass(frozen=True)
class Column:
    """All results of one way. `off_by`: the sum of all accounts minus the sum at the beginning."""

    orders: Outcome
    slowness: Slowness
    transfers: Outcome
    off_by: int

    @property
    def flawless(self) -> bool:
        """Whether there are no errors."""
        counts = (self.orders.counts, self.slowness.counts, self.transfers.counts)
        return all(one.flawless for one in counts) and not (self.orders.left or self.off_by or self.slowness.refused)


Value = Callable[[Column], object]
# The label, the figure, and whether any value but zero is bad.
Row = tuple[str, Value, bool]

ORDERS: list[Row] = [
    ("kills of the shop", lambda one: one.orders.deaths, False),
    ("kills of its consumers", lambda one: one.orders.consumer_deaths, False),
    ("saved", lambda one: one.orders.counts.saved, False),
    ("announced", lambda one: one.orders.counts.announced, False),
    ("lost", lambda one: one.orders.counts.lost, True),
    ("invented", lambda one: one.orders.counts.invented, True),
    ("processed twice", lambda one: one.orders.counts.twice, True),
    ("cancellations by hand", lambda one: one.orders.counts.by_hand, True),
    ("waiting for a person", lambda one: f"{one.orders.waiting} → {one.orders.left}", False),
]
SLOWNESS: list[Row] = [
    ("orders saved", lambda one: one.slowness.counts.saved, False),
    ("connection-seconds held", lambda one: f"{one.slowness.held_s:.1f}", False),
    ("refused: pool is empty", lambda one: one.slowness.refused, True),
    ("consumed before commit", lambda one: one.slowness.counts.early, True),
]
TRANSFERS: list[Row] = [
    ("debited in bank A", lambda one: one.transfers.counts.saved, False),
    ("never credited in bank B", lambda one: one.transfers.counts.lost, True),
    ("credited, never debited", lambda one: one.transfers.counts.invented, True),
    ("credited twice", lambda one: one.transfers.counts.twice, True),
    ("sum of accounts: off by", lambda one: f"{one.off_by:+,}" if one.off_by else "0", True),
]


def table_of(columns: Mapping[Way, Column], orders: int, transfers: int, slow_s: float) -> Table:
    """Return the table; its figures come only from the columns. It fits into 80 characters."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for way in columns:
        # Two lines and three, to align equal steps.
        title, order = f"{way.title} ".split(" ")[:2], way.order.split(" ")
        table.add_column(Text.assemble("\n".join(title), "\n", ("\n".join(order), "not bold")), justify="right")
    sections = (
        (f"{orders} orders", ORDERS),
        (f"broker answers after {slow_s:g} s", SLOWNESS),
        (f"{transfers} transfers of {AMOUNT:,}", TRANSFERS),
    )
    for heading, rows in sections:
        table.add_section()
        table.add_row(Text(heading, style="bold"))
        for label, value, bad in rows:
            table.add_row(f"  {label}", *(_cell(value(column), bad=bad) for column in columns.values()))
    return table


def _cell(value: object, *, bad: bool) -> Text:
    text = str(value)
    return Text(text, style="" if not bad else "green" if text == "0" else "bold red")
