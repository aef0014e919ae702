"""The overview: what needs a person now. Each figure leads to its list."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.dead_letters import DeadLetterQuery, list_of_dead_letters
from app.routers.reconciliation import ReconciliationQuery, get_reconciliation
from app.routers.subscriptions import list_subscriptions
from app.routers.transactions import TransactionQuery, list_of_transactions
from app.runtime.readiness import readiness
from app.schemas.fields import PageQuery
from app.verdicts import State

_LOOKED_AT = 100


async def show(visit: Visit) -> Response:
    """Show the state of the whole service."""
    runtime, caller = visit.runtime, visit.caller
    in_doubt = await list_of_transactions(runtime, caller, TransactionQuery(state=State.IN_DOUBT, limit=_LOOKED_AT))
    parked = await list_of_transactions(runtime, caller, TransactionQuery(state=State.PARKED, limit=_LOOKED_AT))
    dead = await list_of_dead_letters(runtime, caller, DeadLetterQuery(limit=_LOOKED_AT))
    subscriptions = await list_subscriptions(runtime, caller, PageQuery(limit=1000))
    return visit.page(
        "overview.html",
        in_doubt=in_doubt,
        parked=parked,
        dead=dead,
        stopped=[one for one in subscriptions.items if one.state != "active"],
        subscriptions=subscriptions,
        proof=await get_reconciliation(runtime, ReconciliationQuery(limit=7)),
        health=await readiness(runtime),
        command_shown=command("transactions", "list", state="in_doubt"),
        now=runtime.clock.now(),
    )


PAGES = [Page("GET", "/console", show, ("GET", "/transactions"))]
