"""The shop: accepts orders over HTTP, and sends a message about each order that it commits."""

import argparse
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from demo.processes import api_key, listening_host
from demo.shop import OutOfStock, Shop
from demo.signature import is_genuine

GROUP = "demo-shop"


class Order(BaseModel):
    """A customer's order; `die` kills the shop between its own commit and the end, like a power failure."""

    number: int
    article: str = "teapot"
    pieces: int = 1
    die: bool = False


def create_app(shop: Shop, halfnote: httpx.Client, secret: str) -> FastAPI:
    """Return the shop's HTTP: customers post /orders, Halfnote asks at /check."""
    app = FastAPI()

    @app.post("/orders", status_code=201)
    def place_order(order: Order) -> dict[str, str]:
        # The shop chooses the id, so that Halfnote recognizes a half that the shop repeats after a timeout.
        transaction_id = new_id()
        say(f"half message of order {order.number}: stored by Halfnote, invisible to subscribers")
        post(halfnote, "/half", half_of(transaction_id, order))
        try:
            shop.place(order.number, order.article, order.pieces, transaction_id)
        except OutOfStock as error:
            say(f"order {order.number} fails here: {error}. End: rollback")
            post_end(halfnote, end_of(transaction_id, "rollback", reason=str(error)))
            raise HTTPException(409, str(error)) from None
        say(f"order {order.number} is committed in the shop's own database")
        if order.die:
            say("killed before it can post the end (SIGKILL)")
            os.kill(os.getpid(), signal.SIGKILL)
        say(f"end of order {order.number}: commit")
        post_end(halfnote, end_of(transaction_id, "commit"))
        return {"transaction_id": transaction_id}

    @app.post("/check")
    async def check(request: Request) -> dict[str, str]:
        body = await request.body()
        if not is_genuine(secret, request.headers, body):
            raise HTTPException(401, "not signed by Halfnote")
        question = await request.json()
        if question["type"] == "halfnote.ping":
            return {}
        if shop.has(question["transaction_id"]):
            say("check from Halfnote: the order is in the database. Answer: commit")
            return {"verdict": "commit"}
        # The local database transaction may still be open, so the order may come later. Never answer rollback here.
        say("check from Halfnote: the order is not in the database. Answer: unknown")
        return {"verdict": "unknown"}

    return app


def half_of(transaction_id: str, order: Order) -> dict[str, Any]:
    """Return the half message of an order."""
    body = {"order": order.number, "article": order.article, "pieces": order.pieces}
    message = {"topic": "order", "key": f"order-{order.number}", "tag": "created", "body": body}
    return {"producer_group": GROUP, "transaction_id": transaction_id, "messages": [message]}


def end_of(transaction_id: str, verdict: str, **reason: str) -> dict[str, Any]:
    """Return the end of a transaction."""
    return {"producer_group": GROUP, "transaction_id": transaction_id, "verdict": verdict, **reason}


def post(halfnote: httpx.Client, path: str, content: dict[str, Any]) -> None:
    """Post to Halfnote. Raises httpx.HTTPError."""
    halfnote.post(path, json=content).raise_for_status()


def post_end(halfnote: httpx.Client, content: dict[str, Any]) -> None:
    """Post an end. A failure is no failure of the order, because Halfnote sends a check."""
    try:
        post(halfnote, "/end", content)
    except httpx.HTTPError as error:
        say(f"the end failed, so Halfnote will send a check: {error}")


def new_id() -> str:
    """Return a UUIDv7: 48 bits of milliseconds, then randomness."""
    number = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10), "big")
    return str(uuid.UUID(int=number & ~(0xF << 76) & ~(3 << 62) | (7 << 76) | (2 << 62)))


def say(text: str) -> None:
    """Print one line about the shop's work."""
    print(f"    shop      {text}", flush=True)


def main() -> None:
    """Serve the shop; the secret of its producer group is in DEMO_SECRET."""
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--database", type=Path, required=True)
    options.add_argument("--halfnote", required=True)
    given = options.parse_args()
    with httpx.Client(base_url=given.halfnote, headers=api_key(), timeout=10) as halfnote:
        app = create_app(Shop(given.database), halfnote, os.environ["DEMO_SECRET"])
        uvicorn.run(app, host=listening_host(), port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
