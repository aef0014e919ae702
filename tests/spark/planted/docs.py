"""The table of docs/guarantees.md: the planted faults that the rules over tables do not find, and why."""

from tests.spark.planted.planting import FAULTS
from tests.spark.planted.wholes import WHOLES

SHOWN_BY = {"ledgers": "ledgers", "certificate": "the day's certificate"}
HEAD = "| planted fault | shown by | why the tables do not show it |\n|---|---|---|\n"


def table() -> str:
    """Return the table as the page has it."""
    rows = [(fault.name, SHOWN_BY[fault.by], fault.why) for fault in FAULTS if fault.by != "tables"]
    rows += [(f"whole day: {whole.name}", "ledgers, the day's certificate", whole.why) for whole in WHOLES if whole.why]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
