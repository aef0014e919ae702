"""How a page shows bodies: indented as the whole body would be, and bounded whatever a producer sent."""

import json
import tracemalloc

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console.body_view import SHOWN_BYTES, body_of
from tests.support.console_forms import FORM

MiB = 1024 * 1024
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def nested(levels: int, elements: int) -> bytes:
    return b"[" * levels + b",".join([b"1"] * elements) + b"]" * levels


@given(VALUES, st.sampled_from([None, 1, "\t", "\r\n"]), st.booleans())
def test_json_is_indented_with_its_values_as_they_were(value: object, indent: int | str | None, ascii: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii).encode(errors="surrogatepass")
    view = body_of(body, "application/json")
    assert view.text == msgspec.json.format(body, indent=2).decode()
    assert (view.form, view.size, view.is_cut) == ("JSON", len(body), False)


@pytest.mark.parametrize(
    "body",
    [
        nested(800, 20_000),
        nested(1, 2 * MiB),
        b'{"' + b"k" * 4 * MiB + b'":1}',
        b'["' + rb"\"" * 2 * MiB + b'"]',
        b"[" + b"1" * 4 * MiB + b"]",
        b"[" + b" " * 4 * MiB + b"1]",
        "".join(["[", '"ä€😀",' * 300_000, "1]"]).encode(),
    ],
    ids=["deep", "wide", "key", "escapes", "number", "space", "characters"],
)
def test_indenting_a_body_takes_no_more_than_what_is_shown(body: bytes) -> None:
    tracemalloc.start()
    try:
        view = body_of(body, "application/json")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The whole body is decoded once, to know whether it is UTF-8.
    assert most < 8 * len(body) + 2 * MiB
    assert len(view.text) <= SHOWN_BYTES
    assert view.is_cut is (b" 1]" not in body)


@pytest.mark.parametrize("control", ["", "\x00", "\x1f"])
def test_other_bodies_are_text_without_control_characters(control: str) -> None:
    body = ("order 1030\t\r\n" + "é" * SHOWN_BYTES + control).encode()
    view = body_of(body, "text/plain")
    assert view.form == ("binary" if control else "text")
    assert view.is_cut
    assert len(view.text) <= (SHOWN_BYTES if view.form == "text" else 5 * SHOWN_BYTES)


async def test_the_page_of_a_deep_body_is_bounded(client: httpx.AsyncClient, group: str) -> None:
    deep = nested(800, 50_000)
    answer = await client.post(
        "/half",
        content=b'{"producer_group": "shop", "messages": [{"topic": "order", "body": ' + deep + b"}]}",
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 201, answer.text
    tracemalloc.start()
    try:
        page = await client.get(f"/console/transactions/{answer.json()['transaction_id']}", headers=FORM)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert page.status_code == 200
    assert "\n" + "  " * 200 + "[\n" in page.text
    assert len(page.content) < 8 * SHOWN_BYTES
    assert most < 32 * MiB
