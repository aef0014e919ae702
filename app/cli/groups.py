"""`halfnote groups`: register, show, test and delete producer groups."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, FromFile, Url, all_pages, call, path_of, print_json, request_of
from app.cli.confirmation import Yes, must_agree
from app.cli.field_changes import ChangesFile, changes_of
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import age, moment, print_fields, print_new_secret, print_table, reset_line, span, text

app = typer.Typer(
    help="Producer groups: their check URLs and check-back policy.", no_args_is_help=True, cls=SortedCommands
)

GroupName = Annotated[str, typer.Argument(metavar="NAME", help="the producer group")]
CheckUrls = Annotated[list[str] | None, typer.Option("--check-url", help="a URL for check-back; repeat for failover")]
Checks = Annotated[str | None, typer.Option(help="call; or claim: producers may claim the checks, and need no URL")]
BatchChecks = Annotated[bool | None, typer.Option(help="ask about up to 100 transactions in one call")]
Immunity = Annotated[int | None, typer.Option(help="seconds until the first check of a half message")]
Interval = Annotated[int | None, typer.Option(help="seconds between checks")]
MaxChecks = Annotated[int | None, typer.Option(help="checks that are answered without a verdict before --on-exhausted")]
CheckTimeout = Annotated[int | None, typer.Option(help="seconds for one check")]
UnansweredPark = Annotated[int | None, typer.Option(help="seconds of unanswered checks until a transaction is parked")]
OnExhausted = Annotated[str | None, typer.Option(help="rollback or park, when the last check brings no verdict")]
CheckMaxInFlight = Annotated[int | None, typer.Option(help="checks in flight at once")]
PingInterval = Annotated[int | None, typer.Option(help="seconds between pings of a check URL")]
Secret = Annotated[str | None, typer.Option(help="whsec_...; a new group without one gets one, shown once")]


@app.command("put")
def put(
    name: GroupName,
    check_url: CheckUrls = None,
    checks: Checks = None,
    batch_checks: BatchChecks = None,
    immunity_s: Immunity = None,
    interval_s: Interval = None,
    max_checks: MaxChecks = None,
    check_timeout_s: CheckTimeout = None,
    unanswered_park_s: UnansweredPark = None,
    on_exhausted: OnExhausted = None,
    check_max_in_flight: CheckMaxInFlight = None,
    ping_interval_s: PingInterval = None,
    secret: Secret = None,
    file: FromFile = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Register a group, or replace its URLs and policy. An omitted option gets its default; an omitted secret stays."""
    content = request_of(
        file,
        check_urls=check_url,
        checks=checks,
        batch_checks=batch_checks,
        immunity_s=immunity_s,
        interval_s=interval_s,
        max_checks=max_checks,
        check_timeout_s=check_timeout_s,
        unanswered_park_s=unanswered_park_s,
        on_exhausted=on_exhausted,
        check_max_in_flight=check_max_in_flight,
        ping_interval_s=ping_interval_s,
        secret=secret,
    )
    _show(call(url, "PUT", path_of("producer-groups", name), content=content, as_json=as_json), as_json)


@app.command("get")
def get(name: GroupName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a group: its policy, and the last answers of its check URLs."""
    _show(call(url, "GET", path_of("producer-groups", name), as_json=as_json), as_json)


class GroupOrder(StrEnum):
    """The order of the list."""

    NAME = "name"
    UNDECIDED = "undecided"
    OLDEST = "oldest"


@app.command("list")
def list_groups(
    sort: Annotated[
        GroupOrder, typer.Option(help="name; undecided: the most first; oldest: in doubt longest first")
    ] = (GroupOrder.NAME),
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the groups with their transactions in doubt and parked, and the last error of their check URLs."""
    groups = all_pages(url, "/producer-groups", as_json=as_json, standing=True, sort=sort.value)
    if as_json:
        print_json(groups)
        return
    now = datetime.now(UTC)
    rows = [
        (
            group["name"],
            *_standing(group["standing"]),
            _failing(group["urls"], now),
            "\n".join([*group["check_urls"], *(["claimed"] if group["checks"] == "claim" else [])]),
            f"{span(group['immunity_s'])}, then every {span(group['interval_s'])}",
            f"{group['max_checks']}, then {group['on_exhausted']}",
        )
        for group in groups
    ]
    columns = ("group", "in doubt", "parked", "last error", "check urls", "asked after", "checks")
    print_table(columns, rows, whole=("in doubt", "parked"))


@app.command("test")
def ping(name: GroupName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Ping each check URL now. Exit code 1 if one does not answer."""
    answer = call(url, "POST", path_of("producer-groups", name, "test"), as_json=as_json)
    if as_json:
        print_json(answer)
    else:
        rows = [
            (
                one["url"],
                "answered" if one["ok"] else one["error"] or "refused",
                text(one["status"]) or "",
                f"{one['duration_ms']} ms",
            )
            for one in answer["results"]
        ]
        print_table(("check url", "outcome", "status", "took"), rows)
    if not all(one["ok"] for one in answer["results"]):
        raise typer.Exit(1)


@app.command("rotate-secret")
def rotate_secret(name: GroupName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Make a new secret, shown once; the old one signs as well for a day."""
    answer = call(url, "POST", path_of("producer-groups", name, "rotate-secret"), as_json=as_json)
    print_json(answer) if as_json else print_new_secret(answer)


@app.command("patch")
def patch(
    name: GroupName,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE...",
            help="fields to change, with values as JSON or plain text, such as interval_s=60 or max_checks=null",
        ),
    ] = None,
    file: ChangesFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check, and show what would change")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change some fields of a group; the others stay as they are. null is a field's default."""
    query = {"dry_run": "true" if dry_run else None}
    path = path_of("producer-groups", name)
    _show(call(url, "PATCH", path, query=query, content=changes_of(changes, file), as_json=as_json), as_json)


@app.command("delete")
def delete(name: GroupName, yes: Yes = False, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a group that has no undecided transactions."""
    must_agree(
        f"The producer group {name} will be deleted, with its policy and its secret. Go on?",
        "Nothing was deleted.",
        yes=yes,
    )
    call(url, "DELETE", path_of("producer-groups", name), as_json=as_json)


def _standing(found: dict[str, Any]) -> tuple[str, str]:
    more = "" if found["exact"] else "+"
    return f"{found['in_doubt']}{more}", f"{found['parked']}{more}"


def _failing(urls: list[dict[str, Any]], now: datetime) -> str:
    failing = [one for one in urls if one["last_error"]]
    return f"{failing[0]['last_error']}, {age(failing[0]['last_error_at'], now)}" if failing else ""


def _show(group: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(group)
        return
    print_fields(
        {
            "group": group["name"],
            "asked": f"{span(group['immunity_s'])} after its birth, then every {span(group['interval_s'])}",
            "checks": _checks(group),
            "at most": f"{group['max_checks']} answered unknown, then {group['on_exhausted']}",
            "one call": f"{span(group['check_timeout_s'])} at most, {group['check_max_in_flight']} at once",
            "held until": moment(group["held_until"]),
            "unanswered": f"parked after {span(group['unanswered_park_s'])}",
            **_open(group),
            "pinged": f"every {span(group['ping_interval_s'])}",
            "registered": moment(group["created_at"]),
            "changed": moment(group["updated_at"]),
            "secret (shown this once)": group.get("secret"),
            **reset_line(group),
        }
    )
    if not group["urls"]:
        return
    print()
    rows = [(one["url"], moment(one["last_ok"]) or "never", _last_error(one)) for one in group["urls"]]
    print_table(("check url", "last answered", "last error"), rows)


def _open(group: dict[str, Any]) -> dict[str, str]:
    """Return the lines that only GET has."""
    if "standing" not in group:
        return {}
    in_doubt, parked = _standing(group["standing"])
    answers = ", ".join(f"{one['checks']} {one['outcome']}" for one in group["answers"])
    return {"in doubt": in_doubt, "parked": parked, "answers": answers or "none of undecided transactions"}


def _checks(group: dict[str, Any]) -> str:
    many = ", up to 100 transactions each" if group["batch_checks"] else ""
    called = f"by calls of its check URLs{many}" if group["check_urls"] else None
    last = moment(group["claimed_at"])
    claimed = f"by claims of its producers (last: {last or 'never'})" if group["checks"] == "claim" else None
    return " and ".join(filter(None, (claimed, called)))


def _last_error(one: dict[str, Any]) -> str:
    return f"{moment(one['last_error_at'])} {one['last_error']}" if one["last_error"] else "none"
