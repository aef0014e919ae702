"""`halfnote apply`: the service becomes what files declare, and a second run changes nothing."""

import io
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.conftest import migrated_template
from tests.support import postgres
from tests.support.cli_runs import Outcome, Run, runner
from tests.support.processes import serving

Apply = Callable[..., Outcome]


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service of this file's own, because --prune deletes what other tests make."""
    database = postgres.create_database(migrated_template())
    with serving(tmp_path_factory.mktemp("service"), database) as url:
        yield url
    postgres.drop_database(database)


@pytest.fixture
def run(own_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `halfnote` against that service."""
    return runner(own_url, monkeypatch, capsys)


@pytest.fixture
def apply(run: Run, tmp_path: Path) -> Apply:
    """Apply a text as a file."""
    return applier(run, tmp_path)


@pytest.fixture
def apply_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Apply:
    """Apply a text that is refused before a service is called."""
    return applier(runner("http://127.0.0.1:9", monkeypatch, capsys), tmp_path)


def applier(run: Run, folder: Path) -> Apply:
    """Return a function that applies a text."""

    def apply(text: str, *options: str) -> Outcome:
        file = folder / "halfnote.yaml"
        file.write_text(text)
        return run("apply", "-f", str(file), *options)

    return apply


@pytest.fixture
def name() -> str:
    """A name of the test's own."""
    return f"t{uuid4().hex[:8]}"


def declared(name: str, **changed: str) -> str:
    """Return one resource of each section."""
    fields = {"interval_s": "interval_s: 60", "rate": "rate_per_s: 5", "topics": f"[{name}.order]", **changed}
    return f"""
topics: [{name}.order]
groups:
  {name}:
    check_urls: [http://127.0.0.1:9/check]
    {fields["interval_s"]}
subscriptions:
  {name}:
    topics: [{name}.order]
    destination: {{type: webhook, url: "http://127.0.0.1:9/orders"}}
    {fields["rate"]}
keys:
  {name}: {{role: producer, producer_groups: [{name}], topics: {fields["topics"]}}}
"""


def shown(run: Run, command: str) -> str:
    """Return a list as text, without what the service's own pings change."""
    found = run(command, "list", "--json").json
    return json.dumps([{name: one[name] for name in one if name != "urls"} for one in found], sort_keys=True)


def everything(run: Run) -> list[str]:
    return [shown(run, command) for command in ("topics", "groups", "subscriptions", "keys")]


def test_applying_twice_changes_nothing(run: Run, apply: Apply, name: str, tmp_path: Path) -> None:
    out = tmp_path / "secrets.json"
    before = everything(run)
    dry = apply(declared(name), "--dry-run")
    assert (dry.code, everything(run)) == (3, before)
    assert "4 to create, 0 to change, 0 to delete, 0 unchanged" in dry.out
    made = apply(declared(name), "--secrets-out", str(out))
    assert made.code == 0, made.err
    assert [line for line in made.out.splitlines() if line.startswith("+")] == [
        f"+ topic {name}.order",
        f"+ group {name}",
        f"+ subscription {name}",
        f"+ key {name}",
    ]
    after = everything(run)
    assert after != before
    secrets = json.loads(out.read_text())
    assert {section: list(named) for section, named in secrets.items()} == {
        "groups": [name],
        "subscriptions": [name],
        "keys": [name],
    }
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert not any(secret in made.out for named in secrets.values() for secret in named.values())
    assert secrets["keys"][name].startswith("hn_")
    again = apply(declared(name))
    assert (again.code, everything(run)) == (0, after)
    assert again.out == "0 to create, 0 to change, 0 to delete, 4 unchanged\n"
    assert apply(declared(name), "--dry-run").code == 0


def test_a_change_shows_old_new_and_what_was_left_out(run: Run, apply: Apply, name: str) -> None:
    assert apply(declared(name), "--secrets-out", "-").code == 0
    text = declared(name, interval_s="interval_s: 45", rate="", topics="[other]")
    expected = [
        f"~ group {name}",
        "    interval_s: 60 → 45",
        f"~ subscription {name}",
        "    rate_per_s: 5.0 → none (left out: the default)",
        f"~ key {name}",
        f'    topics: ["{name}.order"] → ["other"]',
    ]
    for options in (["--dry-run"], []):
        assert expected == apply(text, *options).out.splitlines()[:-1]
    assert apply(text, "--dry-run").code == 0
    [key] = [one for one in run("keys", "list", "--json").json if one["name"] == name]
    assert key["topics"] == ["other"]
    assert key["revoked_at"] is None


@pytest.mark.slow
def test_a_rotated_key_gets_the_scope_with_its_former_key(run: Run, apply: Apply, name: str) -> None:
    apply(declared(name), "--secrets-out", "-")
    [key] = [one for one in run("keys", "list", "--json").json if one["name"] == name]
    run("keys", "rotate", str(key["key_id"]))
    assert apply(declared(name), "--dry-run").code == 0
    assert apply(declared(name, topics="[other]")).code == 0
    keys = [one for one in run("keys", "list", "--json").json if one["name"] == name]
    assert [one["topics"] for one in keys] == [["other"], ["other"]]
    assert [one["expires_at"] is None for one in keys] == [True, False]


def test_prune_deletes_in_the_sections_of_the_files_only(
    run: Run, apply: Apply, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(declared(name), "--secrets-out", "-")
    run("keys", "create", "--role", "admin", "--name", f"{name}-admin")
    text = "subscriptions: {}\nkeys: {}\n"
    dry = apply(text, "--prune", "--dry-run")
    assert dry.code == 3
    assert f"- subscription {name} (with its checkpoint," in dry.out
    assert f"- key {name} " in dry.out
    assert f"{name}-admin" not in dry.out
    assert "group" not in dry.out
    before = everything(run)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    refused = apply(text, "--prune")
    assert (refused.code, everything(run)) == (2, before)
    assert f"--prune would delete key {name}" in refused.err
    # Without --prune nothing is deleted.
    assert (apply(text).code, everything(run)) == (0, before)
    assert apply(text, "--prune", "--yes").code == 0
    assert name not in shown(run, "subscriptions")
    assert name in shown(run, "groups")
    live = {one["name"] for one in run("keys", "list", "--json").json if one["revoked_at"] is None}
    assert f"{name}-admin" in live
    assert name not in live
    assert apply(text, "--prune", "--dry-run").code == 0


def test_secrets_are_not_lost(run: Run, apply: Apply, name: str, tmp_path: Path) -> None:
    before = everything(run)
    refused = apply(declared(name))
    assert (refused.code, everything(run)) == (2, before)
    assert f"groups.{name}, subscriptions.{name}, keys.{name}" in refused.err
    foreign = tmp_path / "other.txt"
    foreign.write_text("not of apply")
    assert apply(declared(name), "--secrets-out", str(foreign)).code == 2
    assert apply(declared(name), "--secrets-out", str(tmp_path / "none" / "x")).code == 2
    assert everything(run) == before
    assert foreign.read_text() == "not of apply"
    out = tmp_path / "secrets.json"
    out.write_text('{"groups": {"former": "whsec_former"}}')
    assert apply(declared(name), "--secrets-out", str(out)).code == 0
    assert json.loads(out.read_text())["groups"].keys() == {"former", name}
    assert "whsec_" in apply(declared(f"{name}-2"), "--secrets-out", "-").out


def test_a_secret_comes_from_the_environment_or_a_file(
    run: Run, apply: Apply, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(secret: str) -> str:
        return f"""
groups:
  {name}: {{check_urls: ["http://127.0.0.1:9/"], secret: {secret}}}
subscriptions:
  {name}:
    topics: [order]
    destination:
      type: webhook
      url: http://127.0.0.1:9/
      secret: {secret}
      headers: {{x-tenant: a, authorization: {{env: {name}_TOKEN}}}}
"""

    first, second = "whsec_" + "A" * 32, "whsec_" + "B" * 32
    monkeypatch.setenv(f"{name}_TOKEN", "Bearer s3cret")
    monkeypatch.setenv(f"{name}_SECRET", first)
    (tmp_path / "secret").write_text(second + "\n")
    made = apply(text(f"{{env: {name}_SECRET}}"))
    assert made.code == 0, made.err
    assert "s3cret" not in made.out
    assert first not in made.out
    assert apply(text(f"{{env: {name}_SECRET}}"), "--dry-run").code == 0
    # The service compares, because it shows no secret.
    changed = apply(text("{file: secret}"), "--dry-run")
    assert (changed.code, changed.out.count("secret: another secret")) == (3, 2)
    assert apply(text("{file: secret}")).code == 0
    assert apply(text("{file: secret}"), "--dry-run").code == 0
    plain = apply(text(second))
    assert plain.code == 2
    assert f"halfnote.yaml:3: `groups.{name}.secret` must not be in the file" in plain.err
    monkeypatch.delenv(f"{name}_TOKEN")
    missing = apply(text("{file: secret}"))
    assert (missing.code, "which is not set" in missing.err) == (2, True)


def test_what_failed_and_what_was_not_tried_is_told(
    run: Run, apply: Apply, name: str, own_url: str, tmp_path: Path
) -> None:
    """A group with an undecided transaction cannot be deleted; a later run continues."""
    apply(declared(name), "--secrets-out", "-")
    message = {"topic": f"{name}.order", "body": {}}
    half = httpx.post(f"{own_url}/half", json={"producer_group": name, "messages": [message]}).raise_for_status().json()
    others = {one["name"]: {"check_urls": one["check_urls"]} for one in run("groups", "list", "--json").json}
    del others[name]
    text = json.dumps({"subscriptions": {}, "groups": others, "topics": []})
    failed = apply(text, "--prune", "--yes")
    assert failed.code == 1
    assert f"groups.{name} was not applied" in failed.err
    assert f"topics.{name}.order" in failed.err.partition("Not tried: ")[2]
    assert name not in shown(run, "subscriptions")
    assert name in shown(run, "groups")
    end = {"producer_group": name, "transaction_id": half["transaction_id"], "verdict": "rollback"}
    httpx.post(f"{own_url}/end", json=end).raise_for_status()
    assert apply(text, "--prune", "--yes").code == 0
    assert name not in shown(run, "groups")


def test_the_service_checks_all_before_the_first_change(run: Run, apply: Apply, name: str) -> None:
    before = everything(run)
    text = declared(name).replace("http://127.0.0.1:9/orders", "http://169.254.169.254/x")
    refused = apply(text, "--secrets-out", "-")
    assert (refused.code, everything(run)) == (1, before)
    assert "Nothing was changed." in refused.err
    assert f"subscriptions.{name}: `destination.url`" in refused.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("subscription: {}", "halfnote.yaml:1: `subscription` is not a section (did you mean `subscriptions`?)."),
        ("topics:\n- order\n- order", "halfnote.yaml:3: `topics[1]` names `order` again."),
        ("topics: [halfnote.dead]", "is reserved"),
        ("topics: [1030]", "must be text: put it in quotation marks."),
        ("groups:\n  a: {check_urls: ['http://x/']}\n  a: {}", "halfnote.yaml:3: `groups.a` is given twice."),
        (
            "groups:\n  a:\n    interval_s: 5",
            "halfnote.yaml:2: `groups.a` needs the field `check_urls`, or `checks: claim`.",
        ),
        (
            "groups:\n  a:\n    check_urls: ['http://x/']\n    intervall_s: 5",
            "halfnote.yaml:4: `groups.a.intervall_s` is not a field (did you mean `interval_s`?).",
        ),
        (
            "groups:\n  a:\n    check_urls: ['http://x/']\n    interval_s: no",
            "`groups.a.interval_s` is wrong: must be a",
        ),
        ("groups: {a/b: {}}", "`groups.a/b` is not a name"),
        ("subscriptions:\n  ../x: {}", "halfnote.yaml:2: `subscriptions.../x` is not a name: it must have 1 to 255"),
        (
            "subscriptions:\n  a:\n    topics: [x]\n    destination:\n      type: webhook\n      ulr: http://x/",
            "halfnote.yaml:6: `subscriptions.a.destination.ulr` is not a field (did you mean `url`?).",
        ),
        (
            "subscriptions:\n  a:\n    topics: [x]\n    destination:\n      type: webhook\n      url: http://x/\n"
            "      moed: batch",
            "halfnote.yaml:7: `subscriptions.a.destination.moed` is not a field (did you mean `mode`?).",
        ),
        (
            "subscriptions:\n  a:\n    topics: [x]\n    destination: {type: webhok}",
            "halfnote.yaml:4: `subscriptions.a.destination` is wrong",
        ),
        (
            "subscriptions:\n  a:\n    topics: [x]\n    start: newest\n    destination: {type: nats, url: nats://x:1}",
            "halfnote.yaml:4: `subscriptions.a.start` is wrong",
        ),
        ("keys:\n  a: {role: producer, topics: [x]}", "`producer_groups` is needed by a producer's key"),
        ("keys:\n  a: {role: admin, name: b}", "`keys.a.name` is not a field"),
        ("keys:\n  a: {role: admin, expires_at: 2020-01-01T00:00:00Z}", "is in the past"),
        ("keys:\n  a: {role: admn}", "halfnote.yaml:2: `keys.a.role` is wrong"),
        ("groups:", "halfnote.yaml:1: `groups` must be a mapping of names; `{}` is none."),
        ("[1, 2]", "must be a mapping"),
        ("a: [1\nb: 2", "this is not YAML"),
        ("x-a: &a [*a]", "contains itself"),
        ("groups: !!python/object:os.system {}", "has the tag"),
        ("", "The files declare nothing"),
    ],
)
def test_a_fault_is_one_sentence_with_its_place(apply_alone: Apply, text: str, told: str) -> None:
    refused = apply_alone(text)
    assert (refused.code, refused.out) == (2, "")
    assert told in refused.err
    assert len(refused.err.splitlines()) == 1


@pytest.mark.slow
def test_yaml_is_read_as_json_would_be(run: Run, apply: Apply, name: str, tmp_path: Path) -> None:
    """Several files, documents, a folder, stdin, anchors; JSON with tabs; `no` and times are text."""
    text = f"""
x-shared: &shared {{check_urls: [http://127.0.0.1:9/], interval_s: 90}}
groups:
  {name}-a: {{<<: *shared, interval_s: 91}}
---
topics: [{name}.no, no]
"""
    group = {"groups": {f"{name}-b": {"check_urls": ["http://127.0.0.1:9/"], "interval_s": 92}}}
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "b.json").write_text(json.dumps(group, indent="\t"))
    (folder / "README.md").write_text("not read")
    done = apply(text, "-f", str(folder), "--secrets-out", "-")
    assert done.code == 0, done.err
    found = {one["name"]: one["interval_s"] for one in run("groups", "list", "--json").json}
    assert (found[f"{name}-a"], found[f"{name}-b"]) == (91, 92)
    assert {f"{name}.no", "no"} <= {one["topic"] for one in run("topics", "list", "--json").json}
    (folder / "c.json").write_text(json.dumps(group))
    twice = run("apply", "-f", str(folder))
    assert (twice.code, "is declared twice: also at" in twice.err) == (2, True)


@pytest.fixture
def folders(tmp_path: Path, name: str) -> Path:
    """A folder with a group in a file of its own, and another group in a subfolder."""
    folder = tmp_path / "declared"
    (folder / "shop" / "eu").mkdir(parents=True)
    for file, group in ((folder / "a.yaml", name), (folder / "shop" / "eu" / "b.yaml", f"{name}.eu")):
        file.write_text(f"groups: {{{group}: {{check_urls: ['http://127.0.0.1:9/check']}}}}")
    return folder


def test_pruning_by_a_folder_does_not_delete_what_its_subfolders_declare(run: Run, folders: Path, name: str) -> None:
    made = run("apply", "-f", str(folders), "-f", str(folders / "shop" / "eu"), "--secrets-out", "-")
    assert made.code == 0, made.err
    before = everything(run)
    for options in (["--yes"], ["--dry-run"]):
        refused = run("apply", "-f", str(folders), "--prune", *options)
        assert (refused.code, everything(run)) == (2, before)
        assert f"{folders / 'shop' / 'eu' / 'b.yaml'} is in a subfolder" in refused.err
        assert "--recursive" in refused.err
    assert run("apply", "-f", str(folders), "--recursive", "--prune", "--yes").code == 0
    assert {one["name"] for one in run("groups", "list", "--json").json} >= {name, f"{name}.eu"}
    # Named apart, a subfolder is read as well.
    apart = run("apply", "-f", str(folders), "-f", str(folders / "shop" / "eu"), "--prune", "--yes")
    assert apart.code == 0, apart.err


@pytest.mark.slow
def test_subfolders_are_read_if_asked_for(run: Run, folders: Path, name: str, tmp_path: Path) -> None:
    # As Kubernetes mounts a ConfigMap: the files are links into a hidden folder.
    hidden = folders / "..2026_11_29"
    hidden.mkdir()
    (hidden / "c.yaml").write_text(f"topics: [{name}.order]")
    (folders / "..data").symlink_to(hidden.name)
    (folders / "c.yaml").symlink_to("..data/c.yaml")
    (folders / "linked").symlink_to(folders / "shop")
    (folders / "shop" / "up").symlink_to(folders)
    dry = run("apply", "-f", str(folders), "--dry-run")
    assert [line for line in dry.out.splitlines() if line.startswith("+")] == [
        f"+ topic {name}.order",
        f"+ group {name}",
    ]
    dry = run("apply", "-f", str(folders), "-R", "--dry-run")
    assert [line for line in dry.out.splitlines() if line.startswith("+")] == [
        f"+ topic {name}.order",
        f"+ group {name}",
        f"+ group {name}.eu",
    ]
    # Without its subfolders, the folder of a ConfigMap may prune.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "..data").symlink_to(hidden)
    (alone / "c.yaml").symlink_to("..data/c.yaml")
    pruned = run("apply", "-f", str(alone), "--prune", "--dry-run")
    assert pruned.code == 3, pruned.err
    only_below = run("apply", "-f", str(folders / "shop"), "--dry-run")
    assert (only_below.code, "--recursive" in only_below.err) == (2, True)


@pytest.mark.slow
def test_it_reads_stdin_and_prints_json(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(declared(name)))
    dry = run("apply", "-f", "-", "--dry-run", "--json")
    assert dry.code == 3
    assert [one["action"] for one in dry.json["changes"]] == ["create"] * 4
    assert dry.json["changes"][1]["fields"][1] == {"field": "interval_s", "old": None, "new": 60, "left_out": False}
    monkeypatch.setattr("sys.stdin", io.StringIO(declared(name)))
    made = run("apply", "-f", "-", "--secrets-out", "-", "--json", "--wait", "5")
    assert made.json["secrets"]["keys"][name].startswith("hn_")


def test_it_waits_for_a_service_and_says_that_it_gave_up(apply_alone: Apply) -> None:
    refused = apply_alone("topics: []", "--wait", "0.1")
    assert refused.code == 1
    assert "was not ready within 0.1 s" in refused.err


def test_the_caller_keeps_its_own_key(run: Run, apply: Apply, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("keys", "create", "--role", "operator", "--name", name, "--json").json
    assert f"- key {name} " in apply("keys: {}", "--prune", "--dry-run").out
    monkeypatch.setenv("HALFNOTE_API_KEY", made["key"])
    assert f"- key {name} " not in apply("keys: {}", "--prune", "--dry-run").out


def test_a_key_comes_from_a_store_of_secrets(
    run: Run, apply: Apply, name: str, monkeypatch: pytest.MonkeyPatch, own_url: str
) -> None:
    """Nothing is made, so nothing needs --secrets-out; another key replaces it, and the former ends in a day."""
    text = f"keys: {{{name}: {{role: metrics, key: {{env: {name}_KEY}}}}}}"
    for key, changed in (
        ("hn_" + "a1" * 32, "1 to create, 0 to change"),
        ("hn_" + "b2" * 32, "0 to create, 1 to change"),
    ):
        monkeypatch.setenv(f"{name}_KEY", key)
        made = apply(text)
        assert (made.code, changed in made.out) == (0, True), made.err
        assert key not in made.out
        assert apply(text, "--dry-run").code == 0
    newest, former = [one for one in run("keys", "list", "--json").json if one["name"] == name]
    assert (newest["prefix"], newest["expires_at"]) == ("hn_b2b2b2", None)
    assert (former["prefix"], former["expires_at"] is None) == ("hn_a1a1a1", False)
    monkeypatch.setenv(f"{name}_KEY", "hn_" + "a1" * 32)
    again = apply(text)
    assert (again.code, "This key exists, or existed before" in again.err) == (1, True)
    monkeypatch.setenv(f"{name}_KEY", "hn_short")
    assert "`keys." in apply(text).err
    assert "43 to 128 random letters" in apply(text).err


def test_a_former_key_ends_although_the_run_that_replaced_it_did_not(
    run: Run, apply: Apply, name: str, monkeypatch: pytest.MonkeyPatch, own_url: str
) -> None:
    """The new key was made and the answer lost, so the former one had no end."""
    text = f"keys: {{{name}: {{role: metrics, key: {{env: {name}_KEY}}}}}}"
    first, second = (f"hn_{uuid4().hex * 2}" for _ in range(2))
    monkeypatch.setenv(f"{name}_KEY", first)
    assert apply(text).code == 0
    lost = {"name": name, "role": "metrics", "key": second}
    httpx.post(f"{own_url}/api-keys", json=lost).raise_for_status()
    monkeypatch.setenv(f"{name}_KEY", second)
    dry = apply(text, "--dry-run")
    assert (dry.code, f"    {first[:9]}… expires_at: none → in a day" in dry.out) == (3, True)
    assert apply(text).code == 0
    newest, former = [one for one in run("keys", "list", "--json").json if one["name"] == name]
    assert (newest["expires_at"], former["expires_at"] is None) == (None, False)
    assert apply(text, "--dry-run").code == 0
