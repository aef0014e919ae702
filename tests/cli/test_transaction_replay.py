"""`halfnote transactions replay`."""

from tests.support.cli_requests import group, post_end, post_half
from tests.support.cli_runs import Run, run

__all__ = ["group", "run"]


def test_a_transaction_is_sent_to_one_subscription_again(run: Run, url: str, group: str) -> None:
    run("subscriptions", "put", "resent-mailer", "--topic", "resent", "--to", "http://127.0.0.1:9/in")
    transaction_id = post_half(url, group, "resent")
    asked = ("transactions", "replay", transaction_id, "--subscription", "resent-mailer", "--reason", "lost")
    early = run(*asked)
    assert early.code == 1
    assert "Not committed" in early.err
    post_end(url, group, transaction_id, "commit")
    done = run(*asked, "--position", "0")
    assert done.code == 0
    [replay] = run("subscriptions", "replays", "resent-mailer", "--json").json
    assert f"Replay {replay['replay_id']} has begun" in done.out
    assert (replay["reason"], replay["actor"]) == ("lost", "dana")
    twice = run(*asked)
    assert (twice.code, twice.out) == (1, "")
    assert f"Replay {replay['replay_id']} of `resent-mailer` sends the same messages" in twice.err
    assert run("subscriptions", "cancel-replay", "resent-mailer", str(replay["replay_id"])).code == 0
    assert run(*asked, "--json").json["subscription"] == "resent-mailer"
