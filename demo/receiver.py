"""A service that gives loyalty points for orders: it receives committed messages as signed webhooks."""

import argparse
import os

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from demo.processes import listening_host
from demo.signature import is_genuine


def create_app(secret: str) -> FastAPI:
    """Return the receiver's HTTP: Halfnote posts to /deliveries; GET /received lists the received orders."""
    app = FastAPI()
    received: dict[str, int] = {}

    @app.post("/deliveries")
    async def deliver(request: Request) -> Response:
        body = await request.body()
        if not is_genuine(secret, request.headers, body):
            raise HTTPException(401, "not signed by Halfnote")
        order = (await request.json())["order"]
        # Delivery is at least once: the id shows a repeated message, which gets the same answer.
        if request.headers["webhook-id"] not in received:
            received[request.headers["webhook-id"]] = order
            offset = request.headers["halfnote-offset"]
            print(f"    receiver  order {order} delivered, signature verified, offset {offset}", flush=True)
        return Response(status_code=204)

    @app.get("/received")
    async def orders() -> list[int]:
        return list(received.values())

    return app


def main() -> None:
    """Serve the receiver; the secret of its subscription is in DEMO_SECRET."""
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    port = options.parse_args().port
    uvicorn.run(create_app(os.environ["DEMO_SECRET"]), host=listening_host(), port=port, log_level="warning")


if __name__ == "__main__":
    main()
