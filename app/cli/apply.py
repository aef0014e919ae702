"""`halfnote apply`: make the service's topics, groups, subscriptions and keys what files declare."""

import json
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from app.cli.api_client import DEFAULT_URL, Url, print_json, trusted
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.finite import finite
from app.cli.standard_output import printable
from app.cli.tables import NARROWEST

if TYPE_CHECKING:
    from app.cli.declared.changes import Change, FieldChange
    from app.cli.declared.secrets_out import SecretsOut

# The exit code of a dry run that found differences.
DIFFERENT = 3
SIGNS = {"create": "+", "change": "~", "delete": "-"}
SINGULAR = {"topics": "topic", "groups": "group", "subscriptions": "subscription", "keys": "key"}
LOST = {
    "topics": "takes no new messages where topics must be declared",
    "groups": "checks of its transactions end",
    "subscriptions": "with its checkpoint, its retries and its dead letters",
    "keys": "refused within 2 seconds",
}
RETRY_EVERY_S = 1.0

Files = Annotated[
    list[Path], typer.Option("--file", "-f", help="YAML or JSON; a folder of such files; `-` for stdin; repeatable")
]
Recursive = Annotated[bool, typer.Option("--recursive", "-R", help="also read the subfolders of each folder")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the differences; exit code 3 if there are any")]
Prune = Annotated[
    bool, typer.Option("--prune", help="delete what the files do not declare, in the sections that they have")
]
Yes = Annotated[bool, typer.Option("--yes", help="delete without asking")]
SecretsFile = Annotated[
    Path | None,
    typer.Option(help="write the secrets that the service makes to this file, as JSON, mode 0600; `-` for stdout"),
]
Wait = Annotated[float, typer.Option(callback=finite, help="seconds to wait for the service to be ready")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def install(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("apply")(apply_command)


def apply_command(
    file: Files,
    recursive: Recursive = False,
    dry_run: DryRun = False,
    prune: Prune = False,
    yes: Yes = False,
    secrets_out: SecretsFile = None,
    wait: Wait = 0.0,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make topics, groups, subscriptions and keys what files declare. Applying twice changes nothing.

    Exit codes: 0 done, or no difference; 1 a request failed; 2 a file or an option is wrong, and nothing was changed; 3
    a dry run found differences.
    """
    # Imported here: the API's models take long to import, and other commands do not need them.
    from app.cli.declared.apply_changes import carry_out
    from app.cli.declared.changes import Action, changes
    from app.cli.declared.declarations import read
    from app.cli.declared.secrets_out import SecretsOut

    declarations = read(file, recursive=recursive, prune=prune)
    secrets = SecretsOut(secrets_out)
    _wait(url, wait)
    found = changes(url, declarations, prune=prune)
    if not as_json:
        _print_changes(found)
    if dry_run:
        _finish(found, secrets, as_json=as_json)
        raise typer.Exit(DIFFERENT if any(one.action is not Action.UNCHANGED for one in found) else 0)
    secrets.must_take(found)
    _confirm([one for one in found if one.action is Action.DELETE], yes=yes)
    done: list[Change] = []
    try:
        carry_out(url, found, secrets, done.append)
    finally:
        # Also after a failure: a secret is shown once.
        _finish(done, secrets, as_json=as_json)


def _wait(url: str, seconds: float) -> None:
    """Wait until the service is ready. Raises Refusal."""
    until, verify = time.monotonic() + seconds, trusted(url)
    while seconds:
        try:
            if httpx.get(f"{url.rstrip('/')}/readyz", timeout=5, trust_env=False, verify=verify).status_code == 200:
                return
            reason = "it is not ready"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() >= until:
            raise Refusal(f"{url} was not ready within {seconds:g} s: {reason}.")
        time.sleep(RETRY_EVERY_S)


def _confirm(deleted: "list[Change]", *, yes: bool) -> None:
    """Ask before anything is deleted. Raises Refusal."""
    if not deleted or yes:
        return
    named = ", ".join(f"{SINGULAR[one.section]} {one.name}" for one in deleted)
    if not sys.stdin.isatty():
        raise Refusal(f"Nothing was changed. --prune would delete {named}.\n  Add --yes.", code=WRONG_USAGE)
    if not typer.confirm(f"--prune deletes {named}. Go on?", err=True):
        raise Refusal("Nothing was changed.")


def _print_changes(found: "list[Change]") -> None:
    for change in found:
        sign = SIGNS.get(change.action)
        if sign is None:
            continue
        lost = f" ({LOST[change.section]})" if change.action == "delete" else ""
        _print(f"{sign} {SINGULAR[change.section]} {change.name}{lost}", "    ")
        for one in change.fields:
            _print(f"    {_field_text(change, one)}", "      ")
    counts = {word: sum(one.action == word for one in found) for word in ("create", "change", "delete", "unchanged")}
    print(", ".join(f"{count} to {word}" if word in SIGNS else f"{count} {word}" for word, count in counts.items()))


def _field_text(change: "Change", one: "FieldChange") -> str:
    if change.action == "create":
        return f"{one.field}: {_text(one.new)}"
    # The service shows no secret, so both values read the same.
    values = "another secret" if one.old == one.new else f"{_text(one.old)} {printable('→', '->')} {_text(one.new)}"
    return f"{one.field}: {values}{' (left out: the default)' if one.left_out else ''}"


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _print(text: str, indent: str) -> None:
    own = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(text.strip(), NARROWEST, initial_indent=own, subsequent_indent=indent, break_on_hyphens=False)
    print("\n".join(lines))


def _finish(changes: "list[Change]", secrets: "SecretsOut", *, as_json: bool) -> None:
    """Print the changes as JSON, or the new secrets for people."""
    if as_json:
        shown = [
            {
                "kind": SINGULAR[one.section],
                "name": one.name,
                "action": one.action,
                "fields": [
                    {"field": each.field, "old": each.old, "new": each.new, "left_out": each.left_out}
                    for each in one.fields
                ],
            }
            for one in changes
        ]
        print_json({"changes": shown, "secrets": secrets.to_print})
        return
    for section, named in secrets.to_print.items():
        for name, secret in named.items():
            print(f"{SINGULAR[section]} {name} (shown this once):\n  {secret}")
