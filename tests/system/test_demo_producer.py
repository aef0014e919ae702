"""The demo's shop: its answer to a customer says what its own database has."""

from pathlib import Path

import httpx
import pytest

from demo.producer import create_app
from demo.shop import Shop


@pytest.mark.parametrize("pieces", [1, 10_000])
async def test_an_end_that_fails_is_no_failure_of_the_order(
    tmp_path: Path, pieces: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503 if request.url.path == "/end" else 201)

    with httpx.Client(base_url="http://halfnote", transport=httpx.MockTransport(answer)) as halfnote:
        app = create_app(Shop(tmp_path / "shop.db"), halfnote, "whsec_")
        async with httpx.AsyncClient(base_url="http://shop", transport=httpx.ASGITransport(app=app)) as customer:
            placed = await customer.post("/orders", json={"number": 1030, "pieces": pieces})
    assert placed.status_code == (201 if pieces == 1 else 409)
    assert "Halfnote will send a check" in capsys.readouterr().out
