"""The words of enumerations are the ones that the tables' constraints take, and that the API's schemas name."""

import re
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest
from sqlalchemy import CheckConstraint

from app import verdicts
from app.coordinator.wire import CheckPolicy
from app.models import metadata
from app.schemas.dead_letters import Waiting
from app.schemas.producer_groups import GroupAnswer, GroupPut
from app.schemas.reconciliation import DayShown, RunShown
from app.schemas.replays import ReplayAnswer
from app.schemas.subscription_put import SubscriptionPut
from app.schemas.subscriptions import SubscriptionAnswer
from app.schemas.transactions import SourceWord, VerdictWord
from app.store.relay.results import SETTLE, SettlementResult
from app.verdicts import DeliveryOutcome


def taken(name: str) -> set[str]:
    """Return the values that a constraint names."""
    [text] = [
        str(one.sqltext)
        for table in metadata.tables.values()
        for one in table.constraints
        if isinstance(one, CheckConstraint) and one.name == name
    ]
    inside = text.partition(" IN (")[2].removesuffix(")")
    return {value.strip("'") for value in inside.split(", ")}


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("op_verdict", verdicts.Verdict),
        ("check_back_state", verdicts.CheckBackState),
        ("attempt_kind", verdicts.AttemptKind),
        ("subscription_state", verdicts.SubscriptionState),
        ("subscription_ordered", verdicts.Ordered),
        ("subscription_on_dead", verdicts.OnDead),
        ("producer_group_on_exhausted", verdicts.OnExhausted),
        ("replay_state", verdicts.ReplayState),
        ("redelivery_what", verdicts.DeadLetterAction),
        ("day_state", verdicts.DayState),
        ("reconciliation_run_state", verdicts.RunState),
        ("reconciliation_day_state", verdicts.ReconciledDayState),
    ],
)
def test_an_enumeration_has_the_words_that_its_column_takes(constraint: str, words: type[Enum]) -> None:
    assert {str(one.value) for one in words} == taken(constraint)


def test_sources_are_the_numbers_that_their_column_takes() -> None:
    [text] = [str(one.sqltext) for one in metadata.tables["op"].constraints if one.name == "op_source"]  # type: ignore[attr-defined]
    assert re.fullmatch(r"source BETWEEN 0 AND 3", text)
    assert {source.value for source in verdicts.Source} == {0, 1, 2, 3}


def test_the_api_spells_them_the_same() -> None:
    def words(model: Any, field: str) -> set[str]:
        return set(get_args(model.model_fields[field].annotation))

    def optional_words(annotation: Any) -> set[str]:
        return {word for part in get_args(annotation) for word in get_args(part)}

    assert set(get_args(VerdictWord)) == {one.word for one in verdicts.Verdict}
    assert set(get_args(SourceWord)) == {one.word for one in verdicts.Source}
    assert words(ReplayAnswer, "state") == set(verdicts.ReplayState)
    assert words(SubscriptionAnswer, "state") == {*verdicts.SubscriptionState, verdicts.BreakerState.OPEN}
    assert words(SubscriptionAnswer, "ordered") == words(SubscriptionPut, "ordered") == set(verdicts.Ordered)
    assert words(SubscriptionAnswer, "on_dead") == words(SubscriptionPut, "on_dead") == set(verdicts.OnDead)
    assert words(GroupAnswer, "on_exhausted") == words(GroupPut, "on_exhausted") == set(verdicts.OnExhausted)
    assert optional_words(get_type_hints(CheckPolicy)["on_exhausted"]) == set(verdicts.OnExhausted)
    assert words(RunShown, "state") == set(verdicts.RunState)
    assert words(DayShown, "state") == set(verdicts.ReconciledDayState)
    assert words(Waiting, "state") == set(verdicts.SubscriptionState) - {verdicts.SubscriptionState.ACTIVE}


def test_the_settle_compares_with_the_words_of_results_and_outcomes() -> None:
    def compared(column: str) -> set[str]:
        return set(re.findall(r"'(\w+)'", " ".join(re.findall(rf"\b{column} (?:= '\w+'|in \([^)]*\))", SETTLE))))

    assert compared("result") == set(SettlementResult)
    counted = {DeliveryOutcome.FAILED, DeliveryOutcome.REFUSED}
    assert compared("what") == set(DeliveryOutcome) - counted


def test_a_row_is_read_as_a_member_and_nothing_as_nothing() -> None:
    for found, words in (
        (verdicts.VERDICT_OF, verdicts.Verdict),
        (verdicts.SOURCE_OF, verdicts.Source),
        (verdicts.CHECK_BACK_STATE_OF, verdicts.CheckBackState),
    ):
        assert found == {None: None, **{one.value: one for one in words}}
