"""What no request can contain: commands refuse it in a sentence before they call the service."""

import io
import subprocess
import sys

import pytest

from tests.support.cli_runs import Run, run_alone

__all__ = ["run_alone"]

# As the interpreter reads the bytes `a\xff` of an argument.
NOT_UTF_8 = "a\udcff"
NOT_TEXT = "An argument, or a text of the request, is not text in UTF-8. Nothing was sent."


@pytest.mark.parametrize("address", ["http://dana:s3cret@127.0.0.1:9", "http://dana@127.0.0.1:9", "dana:s3cret@db:9"])
@pytest.mark.parametrize(
    "command",
    [("groups", "list"), ("watch", "--times", "1"), ("apply", "-f", "x"), ("consume", "x"), ("rocketmq",), ("audit",)],
)
def test_an_address_with_a_user_is_refused(
    run_alone: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], address: str
) -> None:
    """It would be sent in place of the key, and messages would repeat the password."""
    monkeypatch.setenv("HALFNOTE_URL", address)
    monkeypatch.setenv("HALFNOTE_API_KEY", "hn_1030")
    refused = run_alone(*command)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("halfnote: The URL of --url or HALFNOTE_URL names a user. ")
    assert "HALFNOTE_API_KEY" in refused.err
    assert "s3cret" not in refused.err


@pytest.mark.parametrize("address", [f"http://{NOT_UTF_8}/", "http://127.0.0.1:9\n"])
def test_an_address_that_is_no_text_is_refused(run_alone: Run, address: str) -> None:
    refused = run_alone("groups", "list", "--url", address)
    assert (refused.code, refused.out) == (2, "")
    assert "has a control character, or is not text in UTF-8" in refused.err


@pytest.mark.parametrize("key", ["hn_s3cretä", "hn_s3cret\nb", f"hn_s3cret{NOT_UTF_8}", "hn_s3cret\x7f"])
@pytest.mark.parametrize("command", [("groups", "list"), ("keys", "list"), ("watch", "--times", "1"), ("rocketmq",)])
def test_a_key_that_no_header_can_contain_is_refused(
    run_alone: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], key: str
) -> None:
    monkeypatch.setenv("HALFNOTE_API_KEY", key)
    refused = run_alone(*command)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("halfnote: HALFNOTE_API_KEY has a character that no key has")
    assert "s3cret" not in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("groups", "get", NOT_UTF_8),
        ("groups", "put", "x", "--check-url", NOT_UTF_8),
        ("transactions", "list", "--key", NOT_UTF_8),
        ("transactions", "verdict", "rollback", "1" * 32, "--reason", NOT_UTF_8),
        ("transactions", "show", NOT_UTF_8),
        ("dead-letters", "drop", "--topic", NOT_UTF_8, "--yes"),
        ("why", NOT_UTF_8),
        ("search", NOT_UTF_8),
        ("topics", "declare", NOT_UTF_8),
        ("consume", NOT_UTF_8, "--once"),
        ("keys", "create", "--role", "viewer", "--name", NOT_UTF_8),
        ("subscriptions", "patch", "x", f"topics={NOT_UTF_8}"),
        ("subscriptions", "patch", "x", 'topics=["\\ud800"]'),
    ],
)
def test_an_argument_that_is_not_utf_8_is_refused(run_alone: Run, arguments: tuple[str, ...]) -> None:
    refused = run_alone(*arguments)
    assert (refused.code, refused.out, refused.err) == (2, "", f"halfnote: {NOT_TEXT}\n")


def test_the_bytes_of_an_argument_that_are_not_utf_8_are_refused() -> None:
    command = [sys.executable, "-m", "app.cli", "groups", "get", b"a\xff", "--url", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, b"", f"halfnote: {NOT_TEXT}\n".encode())


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("subscriptions", "put", "x"), "--rate"),
        (("subscriptions", "put", "x"), "--timeout-s"),
        (("subscriptions", "put", "x"), "--expire-after-s"),
        (("keys", "create", "--role", "viewer"), "--rate-per-s"),
        (("apply", "-f", "-"), "--wait"),
        (("rocketmq",), "--request-timeout-s"),
    ],
)
def test_an_option_that_is_no_finite_number_is_refused(
    run_alone: Run, command: tuple[str, ...], option: str, value: str
) -> None:
    refused = run_alone(*command, f"{option}={value}")
    assert (refused.code, refused.out) == (2, "")
    assert f"Invalid value for '{option}'" in refused.err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("rate_per_s=NaN", "`rate_per_s` is no number"),
        ("rate_per_s=1e999", "`rate_per_s` is no number"),
        ("retry=[Infinity]", "A value of the request is no number"),
    ],
)
def test_a_change_to_a_number_that_json_lacks_is_refused(run_alone: Run, change: str, named: str) -> None:
    refused = run_alone("subscriptions", "patch", "x", change)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"halfnote: {named} of JSON: it is nan or infinite. Nothing was sent.\n"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (("destination=null", "destination.url=http://x/"), "destination.url"),
        (("destination=webhook", "destination.url=http://x/"), "destination.url"),
        (("destination=[]", "destination.a.b=1"), "destination.a.b"),
        (("destination.url=http://x/", "destination=null"), "destination"),
        (("rate_per_s=20", "rate_per_s=30"), "rate_per_s"),
    ],
)
def test_changes_of_which_one_would_be_lost_are_refused(run_alone: Run, changes: tuple[str, ...], field: str) -> None:
    refused = run_alone("subscriptions", "patch", "x", *changes)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"halfnote: `{field}` contradicts another argument: give each field once.\n"


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        (("apply", "-f", "-"), b"topics: [a\xff]", "stdin cannot be read: it is not text in UTF-8."),
        (("apply", "-f", "-"), b'{"topics": ["\\ud800"]}', "has half a character (a lone surrogate)"),
        (("apply", "-f", "-"), b"[" * 100_000, "nested too deeply"),
        (("subscriptions", "put", "x", "--file", "-"), b'{"topics": ["\xff"]}', "- cannot be read as JSON: "),
        (
            ("subscriptions", "put", "x", "--file", "-"),
            b'{"destination": {"type": "pull"}, "topics": ["\\ud800"]}',
            NOT_TEXT,
        ),
        (
            ("subscriptions", "put", "x", "--file", "-"),
            b'{"destination": {"type": "pull"}, "rate_per_s": NaN}',
            "`rate_per_s` is no number",
        ),
        (("subscriptions", "put", "x", "--file", "-"), b"[" * 100_000, "- cannot be read as JSON: "),
    ],
)
def test_input_that_no_request_can_contain_is_refused(
    run_alone: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], given: bytes, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    refused = run_alone(*command)
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.err


@pytest.mark.parametrize("options", [(), ("--set", "mode=batch"), ("--secret", "whsec_x"), ("--file", "-")])
def test_a_subscription_without_a_destination_is_refused(
    run_alone: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """A receiver's URL in --url would get the request, with the key of an admin."""
    monkeypatch.setattr("sys.stdin", io.StringIO('{"topics": ["order"]}'))
    refused = run_alone("subscriptions", "put", "x", "--topic", "t", "--url", "http://127.0.0.1:9/orders", *options)
    assert (refused.code, refused.out) == (2, "")
    said = "Name the destination with --to, or in --file. --url is Halfnote's own address. Nothing was sent."
    assert refused.err == f"halfnote: {said}\n"
