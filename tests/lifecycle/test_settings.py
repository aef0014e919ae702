"""The environment as settings: variables that are no settings are named, and each form of a database URL is taken."""

import re
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
import structlog
from pydantic import ValidationError

from app.config import Settings, unknown_variables
from app.lifecycle.startup import log_unknown_variables
from tests.support.processes import ROOT


def test_a_variable_that_nothing_reads_is_logged_with_the_nearest_name() -> None:
    environment = {"HALFNOTE_DATABSE_URL": "postgresql://db/halfnote", "HALFNOTE_PORT": "8080", "PATH": "/bin"}
    with structlog.testing.capture_logs() as logged:
        log_unknown_variables(environment)
    [line] = logged
    assert (line["event"], line["log_level"]) == ("unknown_setting", "warning")
    assert (line["variable"], line["nearest"]) == ("HALFNOTE_DATABSE_URL", "HALFNOTE_DATABASE_URL")


def test_a_variable_of_another_program_is_not_unknown() -> None:
    names = ("HALFNOTE_API_KEY", "HALFNOTE_SPARK_CONF", "HALFNOTE_TEST_UNTIL")
    # Kubernetes sets these for a Service named halfnote.
    of_kubernetes = (
        "HALFNOTE_SERVICE_HOST",
        "HALFNOTE_SERVICE_PORT",
        "HALFNOTE_SERVICE_PORT_HTTP",
        "HALFNOTE_PORT_8080_TCP",
        "HALFNOTE_PORT_8080_TCP_ADDR",
    )
    assert unknown_variables(dict.fromkeys(names + of_kubernetes, "x")) == {}
    assert unknown_variables({"HALFNOTE_XYZZY": "x"}) == {"HALFNOTE_XYZZY": None}


# A property of RocketMQ messages.
NO_VARIABLES = {"HALFNOTE_HANDLE"}


def test_no_variable_that_the_project_reads_sets_or_names_is_unknown() -> None:
    files = [
        *(file for folder in ("app", "spark", "sdk", "demo", "examples") for file in (ROOT / folder).rglob("*.py")),
        *(file for ends in ("yaml", "tpl", "txt") for file in (ROOT / "helm").rglob(f"*.{ends}")),
        *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"),
        *(ROOT / name for name in ("README.md", "Makefile", "docker-compose.yml")),
    ]
    named = {
        name
        for file in files
        for name in re.findall(r"\bHALFNOTE_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])", file.read_text("utf-8"))
    }
    assert len(named) > 100
    assert unknown_variables(dict.fromkeys(named - NO_VARIABLES, "x")) == {}


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_each_form_of_a_database_url_is_taken(scheme: str) -> None:
    settings = Settings(_env_file=None, database_url=f"{scheme}://u:p@db:6432/halfnote")  # type: ignore[call-arg]
    assert settings.database_url == "postgresql://u:p@db:6432/halfnote"


DAY_S = 86_400


@pytest.mark.parametrize(
    "fields",
    [
        {"retention_s": 45 * DAY_S, "max_retention_s": 45 * DAY_S},
        {"delay_limit_s": 44 * DAY_S - 300},
        {"retention_s": 3600, "max_retention_s": 3600, "delay_limit_s": 0},
        {"audit_keep_s": 36_500 * DAY_S, "archive_keep_s": 36_500 * DAY_S, "max_retention_s": 36_500 * DAY_S},
    ],
)
def test_settings_at_their_limits_are_taken(fields: dict[str, int]) -> None:
    assert Settings(_env_file=None, **fields).model_dump(include=set(fields)) == fields  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"retention_s": 45 * DAY_S + 1}, ("HALFNOTE_RETENTION_S", "HALFNOTE_MAX_RETENTION_S")),
        ({"delay_limit_s": 44 * DAY_S - 299}, ("HALFNOTE_DELAY_LIMIT_S", "HALFNOTE_MAX_RETENTION_S")),
        (
            {"max_retention_s": 41 * DAY_S + 299, "delay_limit_s": 40 * DAY_S},
            ("HALFNOTE_DELAY_LIMIT_S", "HALFNOTE_MAX_RETENTION_S"),
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, int], named: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(_env_file=None, **fields)  # type: ignore[arg-type]
    [error] = refused.value.errors()
    assert all(f"{name} (" in error["msg"] for name in named)
    assert "raise the second" in error["msg"]


@pytest.mark.parametrize(
    ("longest", "retention", "delay_s"),
    [(45, 7, 40 * DAY_S), (30, 7, 29 * DAY_S - 300), (2, 2, DAY_S - 300), (1, 1, 0)],
)
def test_a_lower_longest_retention_lowers_the_defaults_of_what_it_limits(
    longest: int, retention: int, delay_s: int
) -> None:
    settings = Settings(_env_file=None, max_retention_s=longest * DAY_S)  # type: ignore[call-arg]
    assert (settings.retention_s, settings.delay_limit_s) == (retention * DAY_S, delay_s)


TIMES = [name for name in Settings.model_fields if name.endswith("_s")]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", ["inf", "nan", "1" + 30 * "0"])
def test_no_time_is_without_a_limit(name: str, value: str) -> None:
    """A larger one would overflow a date in a loop, long after the start."""
    with pytest.raises(ValidationError, match=f"{name}|{name.upper()}"):
        Settings(_env_file=None, **{name: value})


INTEGERS = [
    name for name, field in Settings.model_fields.items() if int in (field.annotation, *get_args(field.annotation))
]


@pytest.mark.parametrize("name", INTEGERS)
def test_no_number_is_without_a_limit(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(_env_file=None, **{name: "1" + 18 * "0"})
    # Further errors are of settings whose defaults depend on it.
    error = refused.value.errors()[0]
    assert error["loc"][0] == name
    assert re.search(r"less than or equal to \d+|must be", error["msg"])


def test_each_time_of_the_settings_can_be_counted_from_now() -> None:
    for name in TIMES:
        for largest in (one.le for one in Settings.model_fields[name].metadata if hasattr(one, "le")):
            assert datetime.now(UTC) - timedelta(seconds=largest) < datetime.now(UTC) + timedelta(seconds=largest)
