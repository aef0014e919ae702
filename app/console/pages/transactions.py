"""The list of transactions, and one transaction with its timeline, its deliveries and its bodies."""

from functools import partial

from starlette.responses import Response

from app.console.body_view import body_of
from app.console.page import Page
from app.console.rendering import command
from app.console.timeline_picture import picture_of
from app.console.visit import Visit
from app.routers.delivery_reasons import WhyQuery, get_delivery
from app.routers.messages import read_bodies
from app.routers.transactions import TransactionQuery, get_transaction, list_of_transactions
from app.schemas.transactions import TransactionRow, TransactionShown
from app.store.relay.announcements import GROUP
from app.verdicts import DeliveryReason, State

# Bodies shown in the page; the others are named with the command that shows them.
_BODIES = 5

# For these reasons a subscription does not get the message by itself any more; a dead letter is redelivered instead.
_SENDABLE = (
    DeliveryReason.DELIVERED,
    DeliveryReason.DROPPED,
    DeliveryReason.SUBSCRIPTION_NEWER,
    DeliveryReason.CHANGED_SINCE,
    DeliveryReason.NO_RECORD,
)

# The saved filters: a name, and the query.
SAVED: tuple[tuple[str, dict[str, str]], ...] = (
    ("All", {}),
    ("In doubt", {"state": State.IN_DOUBT.value}),
    ("Parked", {"state": State.PARKED.value}),
    ("Half", {"state": State.HALF.value}),
    ("Committed", {"state": State.COMMITTED.value}),
    ("Rolled back", {"state": State.ROLLED_BACK.value}),
    ("By policy", {"source": "policy"}),
    ("By check", {"source": "check"}),
    ("By a person", {"source": "operator"}),
    ("Late end refused", {"refused_end": "true"}),
)
# Filters that are options without a value on the command line.
_YES_OR_NO = ("refused_end", "reissued")
_COLUMNS = (
    "transaction_id",
    "producer_group",
    "state",
    "topic",
    "key",
    "message_count",
    "born_at",
    "verdict",
    "source",
    "decided_at",
    "next_check_at",
    "parked_reason",
    "last_check",
    "last_answer",
)


_ENTRY_COLUMNS = (
    "at",
    "what",
    "verdict",
    "source",
    "actor",
    "reason",
    "check",
    "url",
    "outcome",
    "status",
    "duration_ms",
    "error",
    "message_id",
    "subscription",
    "attempt",
)


async def show_list(visit: Visit) -> Response:
    """Show a page of transactions."""
    query = visit.list_query(TransactionQuery)
    # Operational messages of Halfnote itself are left out unless asked. They are committed when they are born, so they
    # are in no count of another state or group.
    internal = visit.asked.get("internal") == "1" or query.producer_group == GROUP
    is_counted = internal or query.producer_group is not None or query.state not in (None, State.COMMITTED)
    query = query.model_copy(update={"count": is_counted and query.cursor is None})
    read = partial(list_of_transactions, visit.runtime, visit.caller)

    def is_shown(row: TransactionRow) -> bool:
        return internal or row.producer_group != GROUP

    if visit.wants_csv:
        last = {
            "last_check": lambda row: row.last_check and row.last_check.at,
            "last_answer": lambda row: row.last_check and row.last_check.outcome.value,
        }
        return await visit.csv_of_list("transactions", _COLUMNS, query, read, keep=is_shown, **last)
    found = await read(query)
    rows = [row for row in found.items if is_shown(row)]
    shown = {name: visit.asked[name] for name in ("state", "source", *_YES_OR_NO) if name in visit.asked}
    asked = query.model_dump(
        exclude={"limit", "cursor", "count", "sort", "producer_group", *_YES_OR_NO}, exclude_none=True
    )
    sort = None if query.sort == "newest" else query.sort
    said = command("transactions", "list", group=query.producer_group, **asked, sort=sort)
    for name in _YES_OR_NO:
        if (wanted := getattr(query, name)) is not None:
            said += f" --{'' if wanted else 'no-'}{name.replace('_', '-')}"
    return visit.page(
        "transactions.html",
        query=query,
        rows=rows,
        total=found.total,
        hidden=len(found.items) - len(rows),
        next_cursor=found.next_cursor,
        saved=[(name, wanted, wanted == shown) for name, wanted in SAVED],
        states=list(State),
        is_live=True,
        command_shown=said,
        now=visit.runtime.clock.now(),
    )


async def show_one(visit: Visit) -> Response:
    """Show a transaction."""
    transaction_id = visit.path["transaction_id"]
    shown = await get_transaction(visit.runtime, visit.caller, transaction_id)
    if visit.wants_csv:
        return visit.csv_of("transaction", _ENTRY_COLUMNS, shown.timeline, lacks=_lacks(shown))
    why = await get_delivery(visit.runtime, visit.caller, transaction_id, WhyQuery())
    bodies = await read_bodies(visit.runtime, visit.caller, shown.transaction_id, min(_BODIES, len(shown.messages)))
    return visit.page(
        "transaction.html",
        shown=shown,
        why={one.message_id: one for one in why.messages},
        why_left_out=why.deliveries_cursor is not None,
        sendable=_SENDABLE,
        bodies_most=_BODIES,
        picture=picture_of(shown),
        bodies={
            message.message_id: body_of(body, message.content_type)
            for message, body in zip(shown.messages, bodies, strict=False)
        },
        command_shown=command("transactions", "show", str(transaction_id)),
        now=visit.runtime.clock.now(),
    )


def _lacks(shown: TransactionShown) -> str | None:
    """Return what a file of this timeline does not have."""
    lacks = []
    if shown.attempts_cursor is not None:
        lacks.append(f"GET /transactions/{shown.transaction_id}/attempts has the earlier attempts.")
    if shown.deliveries_cursor is not None:
        lacks.append(f"GET /transactions/{shown.transaction_id}/deliveries has the other deliveries.")
    return " ".join(lacks) or None


PAGES = [
    Page("GET", "/console/transactions", show_list, ("GET", "/transactions")),
    Page(
        "GET", "/console/transactions/{transaction_id:uuid}", show_one, ("GET", "/transactions/{transaction_id:uuid}")
    ),
]
