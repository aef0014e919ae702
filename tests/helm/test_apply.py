"""The Job that applies the chart's declaration: what it runs is run, with its own files, on a real service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import migrated_template
from tests.helm.programs import VALUES, rendered
from tests.support import postgres
from tests.support.cli_runs import runner
from tests.support.processes import serving

PRODUCTION = next(file for file in VALUES if file.stem == "production-values")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service."""
    database = postgres.create_database(migrated_template())
    with serving(tmp_path_factory.mktemp("service"), database) as url:
        yield url
    postgres.drop_database(database)


def objects() -> dict[str, Any]:
    """Return what the chart makes for `apply`, by kind."""
    return {
        document["kind"]: document
        for document in yaml.safe_load_all(rendered(PRODUCTION))
        if document and document["metadata"]["name"] == "hn-halfnote-apply"
    }


@pytest.mark.slow
def test_the_job_applies_the_declaration_of_the_chart(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = objects()
    assert set(made) == {"ConfigMap", "Job", "NetworkPolicy"}
    for name, text in made["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    pod = made["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "apply"]
    arguments = [argument.replace(mount, str(tmp_path)) for argument in container["args"]]
    run = runner(url, monkeypatch, capsys)
    for one in container["env"]:
        if "secretKeyRef" in one.get("valueFrom", {}) and one["name"] != "HALFNOTE_API_KEY":
            monkeypatch.setenv(one["name"], run("new-signing-secret").out.strip())
    first = run(*arguments)
    assert first.code == 0, first.err
    assert "+ group shop" in first.out
    assert run("groups", "get", "shop", "--json").json["unanswered_park_s"] == 2_592_000
    again = run(*arguments)
    assert (again.code, again.out) == (0, "0 to create, 0 to change, 0 to delete, 3 unchanged\n")


@pytest.mark.slow
def test_a_secret_that_nothing_would_keep_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Job has no place for it; exit code 2 ends the Job at once."""
    (tmp_path / "halfnote.yaml").write_text("keys: {new: {role: metrics}}")
    refused = runner(url, monkeypatch, capsys)("apply", f"--file={tmp_path}")
    assert refused.code == 2
    [rule] = objects()["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2]
