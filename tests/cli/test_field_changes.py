"""The values of `halfnote subscriptions patch`: JSON, plain text, and texts that look like JSON."""

from typing import Any
from uuid import uuid4

import pytest
from pydantic import BaseModel

from app.cli.field_changes import changes_of
from app.cli.subscription_options import NOT_TEXT
from app.schemas.destinations import KafkaPut, NatsPut, PullShape, RabbitPut, RedisPut, WebhookPut
from tests.support.cli_runs import Run, run

__all__ = ["run"]


@pytest.mark.parametrize("written", ["123", "0123", "1e5", "true", "[1]", '{"a": 1}', "a b"])
@pytest.mark.parametrize("field", ["destination.password", "destination.headers.x-token", "filters.headers.order"])
def test_a_field_that_takes_text_gets_the_text_as_written(field: str, written: str) -> None:
    found: Any = changes_of([f"{field}={written}"])
    for name in field.split("."):
        found = found[name]
    assert found == written


def test_a_text_in_quotes_and_null_are_json_in_any_field() -> None:
    given = ['destination.password="12 3"', "destination.username=null", 'destination.headers={"x-token": "12"}']
    wanted = {"destination": {"password": "12 3", "username": None, "headers": {"x-token": "12"}}}
    assert changes_of(given) == wanted
    assert changes_of(["destination.batch_max=12", "rate_per_s=3", "secret=4"]) == {
        "destination": {"batch_max": 12},
        "rate_per_s": 3,
        "secret": "4",
    }


def test_a_password_and_a_header_of_digits_are_taken(run: Run) -> None:
    name = f"mailer-{uuid4().hex[:8]}"
    broker = ("--to", "amqp://127.0.0.1:9/", "--set", "username=halfnote", "--set", "password=old")
    assert run("subscriptions", "put", name, "--topic", "order", *broker).code == 0
    patched = run("subscriptions", "patch", name, "destination.password=123", "filters.headers.order=1030", "--json")
    assert patched.code == 0, patched.err
    assert patched.json["filters"]["headers"] == {"order": "1030"}


@pytest.mark.parametrize("model", [WebhookPut, RabbitPut, NatsPut, KafkaPut, RedisPut, PullShape])
def test_every_field_of_a_destination_is_known_as_text_or_not(model: type[BaseModel]) -> None:
    for name, schema in model.model_json_schema()["properties"].items():
        kinds = {kind["type"] for kind in schema.get("anyOf", [schema]) if "type" in kind} - {"null"}
        assert kinds, name
        assert (kinds == {"string"}) == (name not in NOT_TEXT), name
