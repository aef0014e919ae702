"""`make demo`: runs the orders 1030 to 1033 and prints each step. The exit code is 0 only if all steps succeeded."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from demo.play import Play
from demo.processes import (
    StepFailed,
    answers,
    api_key,
    await_listening,
    free_port,
    halfnote_url,
    new_secret,
    orderly_end,
    own_halfnote,
    own_host,
    running,
)


def main() -> int:
    """Run the orders; return the exit code."""
    try:
        with orderly_end(), halfnote() as url, tempfile.TemporaryDirectory(prefix="halfnote-demo-") as directory:
            play_at(url, Path(directory))
    except (StepFailed, httpx.HTTPError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def halfnote() -> Iterator[str]:
    """Yield the URL of the running service, or of one started only for the demo."""
    url = halfnote_url()
    if answers(url):
        print(f"Using Halfnote on {url}.", flush=True)
        yield url
        return
    print(
        f"No Halfnote answers on {url} (`make run` starts one).\n"
        "Starting one for the demo, with a database that is deleted afterward ...",
        flush=True,
    )
    with own_halfnote() as url:
        yield url


def play_at(url: str, directory: Path) -> None:
    """Run against the service at the URL, with a shop and a receiver as separate processes."""
    host, secret = own_host(url), new_secret()
    shop_port, receiver_port = free_port(host), free_port(host)
    with (
        httpx.Client(base_url=url, headers=api_key(), timeout=10) as client,
        httpx.Client(base_url=f"http://{host}:{shop_port}", timeout=10) as shop,
        httpx.Client(base_url=f"http://{host}:{receiver_port}", timeout=10) as receiver,
    ):
        play = Play(client, shop, receiver, secret)
        try:
            with running("demo.receiver", secret, host, f"--port={receiver_port}"):
                await_listening(host, receiver_port)
                play.register()
                shop_options = (f"--port={shop_port}", f"--database={directory / 'shop.db'}", f"--halfnote={url}")
                with running("demo.producer", secret, host, *shop_options) as process:
                    await_listening(host, shop_port)
                    play.order_1030()
                    transaction_id = play.order_1031_dies(process)
                with running("demo.producer", secret, host, *shop_options):
                    await_listening(host, shop_port)
                    play.order_1031_is_rescued(transaction_id)
                    play.order_1032_fails()
                play.print_timeline(transaction_id)
        finally:
            play.clean_up()


if __name__ == "__main__":
    sys.exit(main())
