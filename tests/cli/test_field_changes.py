"""The values of `halfnote subscriptions patch`: JSON, plain text, and texts that look like JSON."""

import io
import json
from base64 import b64encode
from pathlib import Path
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


def test_changes_of_a_file_are_joined_with_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "change.json").write_text('{"destination": {"password": "of a file"}}')
    assert changes_of(["destination.username=halfnote", "rate_per_s=3"], tmp_path / "change.json") == {
        "destination": {"password": "of a file", "username": "halfnote"},
        "rate_per_s": 3,
    }


def test_a_secret_comes_from_a_file_or_from_stdin(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"shop-{uuid4().hex[:8]}"
    assert run("groups", "put", name, "--check-url", "http://127.0.0.1:9/check").code == 0
    secret = "whsec_" + b64encode(b"0123456789abcdef" * 2).decode()
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"secret": secret})))
    patched = run("groups", "patch", name, "max_checks=7", "--file", "-", "--json")
    assert patched.code == 0, patched.err
    assert patched.json["changed"] == ["max_checks", "secret"]
    (tmp_path / "change.json").write_text(json.dumps({"destination": {"secret": secret}, "rate_per_s": 20}))
    topic = ("--topic", "order", "--to", "http://127.0.0.1:9/hook")
    assert run("subscriptions", "put", name, *topic).code == 0
    patched = run("subscriptions", "patch", name, "--file", str(tmp_path / "change.json"), "--json")
    assert patched.code == 0, patched.err
    assert patched.json["changed"] == ["rate_per_s", "destination.secret"]


@pytest.mark.parametrize(
    ("given", "written", "error"),
    [
        ((), None, "Give FIELD=VALUE, or a JSON object of fields with --file."),
        (("secret=b",), '{"secret": "a"}', "`secret` contradicts another argument or the file: give each field once."),
        (("secret.x=b",), '{"secret": "a"}', "`secret.x` contradicts another argument or the file"),
        ((), "[1]", "{file} is not a JSON object."),
        ((), "{", "{file} cannot be read as JSON: "),
    ],
)
def test_what_a_patch_cannot_take_is_refused(
    run: Run, tmp_path: Path, given: tuple[str, ...], written: str | None, error: str
) -> None:
    file = tmp_path / "change.json"
    options: tuple[str, ...] = ()
    if written is not None:
        file.write_text(written)
        options = ("--file", str(file))
    refused = run("groups", "patch", "shop", *given, *options)
    assert refused.code == 2
    assert refused.err.startswith(f"halfnote: {error.replace('{file}', str(file))}")


@pytest.mark.parametrize("model", [WebhookPut, RabbitPut, NatsPut, KafkaPut, RedisPut, PullShape])
def test_every_field_of_a_destination_is_known_as_text_or_not(model: type[BaseModel]) -> None:
    for name, schema in model.model_json_schema()["properties"].items():
        kinds = {kind["type"] for kind in schema.get("anyOf", [schema]) if "type" in kind} - {"null"}
        assert kinds, name
        assert (kinds == {"string"}) == (name not in NOT_TEXT), name
