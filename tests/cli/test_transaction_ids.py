"""What stands where a command takes a TRANSACTION_ID: an id in any of its forms, a message's id, or another text."""

import pytest

from tests.support.cli_requests import group, post_half
from tests.support.cli_runs import Run, run, run_alone

__all__ = ["group", "run", "run_alone"]

ACTS = [
    ("check",),
    ("verdict", "commit", "--reason", "r"),
    ("reissue", "--reason", "r"),
    ("replay", "--subscription", "s", "--reason", "r"),
]


@pytest.mark.parametrize("command", [("show",), *ACTS])
def test_another_text_is_refused_with_the_search_for_it(run_alone: Run, command: tuple[str, ...]) -> None:
    refused = run_alone("transactions", *command, "order 1030")
    assert (refused.code, refused.out) == (2, "")
    said = "`order 1030` is not a transaction id. To find what it names:\n  halfnote search 'order 1030'\n"
    assert refused.err == f"halfnote: {said}"


def test_a_message_names_its_transaction_where_it_is_shown(run: Run, url: str, group: str) -> None:
    transaction_id = post_half(url, group)
    for given in (f"{transaction_id}-0", transaction_id.upper(), transaction_id.replace("-", "")):
        shown = run("transactions", "show", given, "--json")
        assert (shown.code, shown.json["transaction_id"]) == (0, transaction_id)


@pytest.mark.parametrize("command", ACTS)
def test_an_act_takes_no_message(run_alone: Run, command: tuple[str, ...]) -> None:
    transaction_id = "01a229f5-9dfe-73b2-a7a1-b524927573de"
    refused = run_alone("transactions", *command, f"{transaction_id}-0")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.endswith(
        f"is the id of a message. Nothing was done. The id of its transaction:\n  {transaction_id}\n"
    )
