"""Every page of the console, in the order in which they are tried."""

from app.console.acts import dead_letters as act_on_dead_letters
from app.console.acts import producer_groups as act_on_groups
from app.console.acts import subscriptions as act_on_subscriptions
from app.console.acts import transactions as act_on_transactions
from app.console.acts.act import ConsoleAct
from app.console.page import Page
from app.console.pages import (
    dead_letters,
    events,
    keys_and_audit,
    openid,
    overview,
    producer_groups,
    proof,
    search,
    sign_in,
    subscriptions,
    topics,
    transactions,
    workers,
)

ACTS: list[ConsoleAct] = [
    *act_on_transactions.ACTS,
    *act_on_subscriptions.ACTS,
    *act_on_dead_letters.ACTS,
    *act_on_groups.ACTS,
]
PAGES: list[Page] = [
    *overview.PAGES,
    *events.PAGES,
    *sign_in.PAGES,
    *openid.PAGES,
    *(page for act in ACTS for page in act.pages()),
    *search.PAGES,
    *transactions.PAGES,
    *subscriptions.PAGES,
    *dead_letters.PAGES,
    *producer_groups.PAGES,
    *topics.PAGES,
    *keys_and_audit.PAGES,
    *proof.PAGES,
    *workers.PAGES,
]
