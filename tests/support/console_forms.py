"""Fills in forms of the console as a browser does: the token of the page, and the cookie of the session."""

import re
from html import unescape

import httpx

TOKEN = re.compile(r'name="csrf" value="([^"]+)"')
HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
FORM = {"accept": "text/html"}


def token_of(page: httpx.Response) -> str:
    """Return the token of a page's form."""
    found = TOKEN.search(page.text)
    assert found is not None, page.text
    return found[1]


async def submit(client: httpx.AsyncClient, path: str, **fields: str) -> httpx.Response:
    """Open an act's page and send its form."""
    page = await client.get(path, headers=FORM)
    assert page.status_code == 200, page.text
    return await send(client, page, **fields)


async def send(client: httpx.AsyncClient, page: httpx.Response, **fields: str) -> httpx.Response:
    """Send the form of an act's page, with its hidden fields."""
    [form] = re.findall(r'<form method="post" action="[^"]*" class="stack">.*?</form>', page.text, re.DOTALL)
    hidden = {name: unescape(value) for name, value in HIDDEN.findall(form)}
    return await client.post(page.url, data={**hidden, **fields}, headers={"origin": "http://localhost"})


async def sign_in(client: httpx.AsyncClient, key: str) -> httpx.Response:
    """Sign in with a key; the client keeps the cookie."""
    client.headers.pop("authorization", None)
    return await submit(client, "/console/sign-in", key=key)
