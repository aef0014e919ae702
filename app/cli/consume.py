"""`halfnote consume`: claim the messages of a subscription, print them, and acknowledge them."""

import sys
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.errors import Refusal, Unavailable
from app.cli.leaving import leaving
from app.cli.standard_output import discard_output
from app.cli.tables import harmless, is_for_people, json_text, moment, print_fields
from app.cli.waiting import AnswerWait
from app.schemas.claims import CLAIM_DEFAULT

# Shorter than the time that a command waits for an answer.
WAIT_S = 20.0
# A slow reader of the output takes time. As the client's consumer.
HELD_S = 60.0


def consume(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a subscription with the destination pull")],
    at_once: Annotated[
        int | None,
        typer.Option("--max", help="the most messages of one claim; not given: the service's default", min=1),
    ] = None,
    count: Annotated[int | None, typer.Option(help="end after this many messages", min=1)] = None,
    once: Annotated[bool, typer.Option("--once", help="end when no message is there")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="do not acknowledge: the messages come again")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Claim messages, print each with its body, and acknowledge what was printed.

    While the service does not answer, this waits and says so on stderr; with --once it ends with exit code 1.
    """
    path, left = path_of("subscriptions", name), count
    post = _post if once else _UntilAnswered()
    with leaving():
        while left is None or left > 0:
            most = _most(at_once, left)
            wanted = {"wait_s": 0.0 if once else WAIT_S, **({} if most is None else {"max": most})}
            messages = _claimed(post, url, path, wanted)
            _write(messages, as_json)
            late = [] if keep or not messages else _acknowledge(post, url, path, messages)
            if left is not None:
                left -= len(messages) - len(late)
            if once and not messages:
                return


Post: TypeAlias = Callable[[str, str, dict[str, Any]], Any]


def _post(url: str, path: str, content: dict[str, Any]) -> Any:
    return call(url, "POST", path, content=content)


class _UntilAnswered:
    """Repeats a call while the service does not answer."""

    def __init__(self) -> None:
        self._waiting = AnswerWait()

    def __call__(self, url: str, path: str, content: dict[str, Any]) -> Any:
        while True:
            try:
                answer = _post(url, path, content)
            except Unavailable as refused:
                self._waiting.wait(refused)
            else:
                self._waiting.end()
                return answer


def _claimed(post: Post, url: str, path: str, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a claim, held for as long as the client holds them, or for less if the service refuses."""
    found: list[dict[str, Any]]
    try:
        found = post(url, f"{path}/claim", {**wanted, "invisible_s": HELD_S})["messages"]
    except Refusal as refused:
        if refused.problem.get("field") != "invisible_s":
            raise
        # The service's default, which its setting lowers.
        found = post(url, f"{path}/claim", wanted)["messages"]
    return found


def _acknowledge(post: Post, url: str, path: str, messages: list[dict[str, Any]]) -> list[str]:
    """Acknowledge messages; return the ids of those that were not held any more, and say so on stderr."""
    handles = [message["handle"] for message in messages]
    outcomes = post(url, f"{path}/ack", {"handles": handles})["outcomes"]
    late = [one["message_id"] for one, outcome in zip(messages, outcomes, strict=True) if outcome["status"] >= 300]
    if late:
        of_them = "1 message was" if len(late) == 1 else f"{len(late)} messages were"
        print(f"{of_them} printed and not acknowledged in time; to come again:", *late, sep="\n  ", file=sys.stderr)
    return late


def _write(messages: list[dict[str, Any]], as_json: bool) -> None:
    """Print messages and hand them to the operating system: what is only in the process's buffer can be lost.

    Raises Refusal if that fails.
    """
    try:
        for message in messages:
            if as_json:
                print_json(message)
            else:
                _print(message)
        sys.stdout.flush()
    except OSError as error:
        discard_output()
        raise Refusal(
            f"The messages cannot be printed: {error.strerror}. Those of the last claim were not acknowledged; they "
            "come again."
        ) from None


def _most(at_once: int | None, left: int | None) -> int | None:
    """Return the most messages of the next claim; None: the service's default, which its settings may lower."""
    if at_once is not None:
        return at_once if left is None else min(at_once, left)
    # A number of our own could be above the setting.
    return None if left is None or left >= CLAIM_DEFAULT else 1


def _print(message: dict[str, Any]) -> None:
    """Print a message with its whole body: for people as fields, in a pipe as one line of columns with tabs between."""
    kind, body = _body_of(message)
    again = str(message["attempt"])
    if is_for_people():
        print_fields(
            {
                "message": message["message_id"],
                "committed": f"{moment(message['committed_at'])} UTC",
                "attempt": again if message["attempt"] > 1 else None,
                "topic": message["topic"],
                "key": message["key"],
                "body (base64)" if kind == "base64" else "body": body,
            }
        )
        print()
        return
    # JSON has its line breaks escaped, so the line is one.
    shown = {"json": body, "text": json_text(body), "base64": f"base64:{body}"}[kind]
    columns = (message["message_id"], moment(message["committed_at"]), again, message["topic"], message["key"], shown)
    print("\t".join(harmless(column or "") for column in columns))


def _body_of(message: dict[str, Any]) -> tuple[str, str]:
    """Return a message's body, whole, and its form: `json`, `text` or `base64`."""
    if "body" in message:
        return "json", json_text(message["body"])
    encoded: str = message["body_base64"]
    if message["content_type"].strip().lower().startswith("text/"):
        with suppress(UnicodeDecodeError):
            return "text", b64decode(encoded).decode()
    return "base64", encoded
