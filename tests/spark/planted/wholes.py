"""Faults of whole tables, hours and days, each in a database of its own."""

from dataclasses import dataclass

TABLES = ("receipt", "attempt", "outbox", "op", "half")
_RECEIPTS_OF = "(select subscription_id from subscription where name = '{}')"


@dataclass(frozen=True)
class Whole:
    """One fault. `finds`: the kinds that must be among the findings; none if only other evidence shows it (`why`)."""

    name: str
    sql: tuple[str, ...]
    finds: frozenset[str]
    why: str = ""


def _whole(name: str, finds: str, *sql: str, why: str = "") -> Whole:
    return Whole(name, sql, frozenset(finds.split()), why)


def _shifted(table: str, by: str, *columns: str) -> str:
    return f"update {table} set " + ", ".join(f"{one} = {one} {by}" for one in columns)


HOUR = "- interval '1 hour'"
LATER = "+ interval '1 hour'"
WHOLES = (
    _whole("no half", "op_without_half", "delete from half"),
    _whole("no op", "half_stuck published_without_commit", "delete from op"),
    _whole("no outbox", "committed_not_published receipt_without_message", "delete from outbox"),
    _whole("no outbox and no receipt", "committed_not_published", "delete from outbox", "delete from receipt"),
    _whole("no receipt", "undelivered", "delete from receipt"),
    _whole(
        "no receipt, checkpoints set back",
        "delivery_late",
        "delete from receipt",
        'update checkpoint set "offset" = 0',
    ),
    _whole("no receipt and no checkpoint", "checkpoint_differs", "delete from receipt", "delete from checkpoint"),
    _whole("no attempt", "verdict_unproven delivery_wrong receipt_wrong", "delete from attempt"),
    _whole("no retry and no dead letter", "undelivered", "delete from delivery_retry", "delete from dead_letter"),
    _whole("no redelivery", "receipt_wrong", "delete from redelivery"),
    _whole("no audit", "verdict_unproven", "delete from audit"),
    _whole("no replay", "receipt_wrong", "delete from replay"),
    _whole("no subscription", "subscription_differs", "delete from subscription"),
    _whole("no version", "subscription_differs", "delete from subscription_version"),
    _whole(
        "everything paused in the history",
        "subscription_differs",
        "delete from receipt",
        'update checkpoint set "offset" = 0',
        "update subscription_version set state = 'paused'",
    ),
    _whole(
        "verdicts are swapped",
        "published_after_rollback committed_not_published",
        "update op set verdict = 3 - verdict",
    ),
    _whole("sources are all the producer's", "verdict_unproven", "update op set source = 0"),
    _whole("offsets are shifted", "receipt_wrong", 'update outbox set "offset" = "offset" + 1000'),
    _whole(
        "offsets are shifted, in receipts too",
        "delivery_wrong",
        'update outbox set "offset" = "offset" + 100000',
        'update receipt set "offset" = "offset" + 100000',
    ),
    _whole("offsets run backwards", "offsets_contradict_time", 'update outbox set "offset" = 100000 - "offset"'),
    _whole("all offsets are one", "offset_of_two_messages", 'update outbox set "offset" = 7'),
    _whole("births a day later", "times_disagree", _shifted("half", "+ interval '1 day'", "born_at", "first_check_at")),
    _whole("verdicts an hour earlier", "times_disagree", _shifted("op", HOUR, "decided_at")),
    _whole("verdicts two days later", "times_disagree", _shifted("op", "+ interval '2 days'", "decided_at")),
    _whole(
        "commits two days earlier",
        "times_disagree",
        _shifted("outbox", "- interval '2 days'", "committed_at", "due_at"),
    ),
    _whole("receipts an hour earlier", "receipt_wrong", _shifted("receipt", HOUR, "first_at", "settled_at")),
    _whole("receipts an hour later", "receipt_wrong", _shifted("receipt", LATER, "first_at", "settled_at")),
    _whole(
        "two subscriptions are swapped",
        "receipt_not_matched undelivered",
        f"update receipt set subscription_id = -1 where subscription_id = {_RECEIPTS_OF.format('plains')}",
        f"update receipt set subscription_id = {_RECEIPTS_OF.format('plains')} "
        f"where subscription_id = {_RECEIPTS_OF.format('sales')}",
        f"update receipt set subscription_id = {_RECEIPTS_OF.format('sales')} where subscription_id = -1",
    ),
    _whole("digests of all halves", "half_altered", "update half set digest = sha256('x') where position = 0"),
    _whole("bodies of all halves", "half_altered", "update half set body = 'x'"),
    _whole("keys of the outbox", "published_differs", "update outbox set key = 'x'"),
    _whole("all receipts are dropped ones", "receipt_wrong", "update receipt set outcome = 'dropped'"),
    _whole(
        "all transactions of a topic are gone",
        "",
        *(
            f"delete from {table} where transaction_id in (select transaction_id from half h where position = 0 and "
            "topic = 'sale')"
            for table in ("receipt", "outbox", "op", "half")
        ),
        why="Their ids are nowhere: the ledgers have them, and a certificate",
    ),
    _whole(
        "the day is empty",
        "verdict_unproven delivery_wrong",
        *(f"delete from {table}" for table in TABLES),
    ),
)
