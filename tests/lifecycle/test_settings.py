"""The environment as settings: variables that are no settings are named, and each form of a database URL is taken."""

import pytest
import structlog

from app.config import Settings, unknown_variables
from app.lifecycle.startup import log_unknown_variables


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


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
def test_each_form_of_a_database_url_is_taken(scheme: str) -> None:
    settings = Settings(_env_file=None, database_url=f"{scheme}://u:p@db:6432/halfnote")  # type: ignore[call-arg]
    assert settings.database_url == "postgresql://u:p@db:6432/halfnote"
