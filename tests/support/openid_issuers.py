"""Issuers of OpenID Connect: a hand-made one that can answer anything, and oidc-provider, a certified one for Node."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.requirements import absent

CLIENT_ID = "halfnote"
PUBLIC_URL = "http://localhost"
# As scripts/test-deps installs it.
PROVIDER = Path.home() / ".cache" / "halfnote" / "oidc-provider-9.13.3"
WITHIN_S = 60.0


@dataclass
class Asked:
    """A request that the issuer got."""

    path: str
    headers: dict[str, str]
    form: dict[str, str]


@dataclass
class HandMadeIssuer:
    """An issuer that trusts everyone and signs what a test wants.

    `claims` are added to those of an ID token; None leaves a claim out. `made` makes the ID token of its claims.
    `answers` replace the answer of a path: a status and a body, or bytes to write as they are.
    """

    url: str = ""
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "one"}))
    published: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    user_info: dict[str, Any] = field(default_factory=dict)
    made: Callable[["HandMadeIssuer", dict[str, Any]], str] | None = None
    answers: dict[str, tuple[int, Any] | bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    # The nonce of the sign-in that is under way; a real issuer keeps it with the code.
    nonce: str = ""

    def settings(self, **fields: Any) -> dict[str, Any]:
        """Return the settings of a service whose people this issuer knows."""
        roles = {"admins": "admin", "oncall": "operator", "staff": "viewer"}
        known = {"oidc_issuer": self.url, "oidc_client_id": CLIENT_ID, "public_url": PUBLIC_URL, "oidc_roles": roles}
        return {**known, **fields}

    def id_token(self) -> str:
        """Return the ID token of the sign-in that is under way."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "sub": "1030",
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": self.nonce,
            "email": "dana@example.com",
            "groups": ["staff"],
            **self.claims,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.made is not None:
            return self.made(self, claims)
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)

    def paths(self) -> list[str]:
        """Return the paths that were asked for."""
        return [asked.path for asked in self.asked]

    def _answer(self, path: str) -> tuple[int, Any] | bytes:
        if path in self.answers:
            return self.answers[path]
        if path == "/.well-known/openid-configuration":
            names = {
                "authorization_endpoint": "authorize",
                "token_endpoint": "token",
                "jwks_uri": "keys",
                "userinfo_endpoint": "me",
            }
            return 200, {
                "issuer": self.url,
                **{name: f"{self.url}/{path}" for name, path in names.items()},
                **self.metadata,
            }
        if path == "/keys":
            return 200, {"keys": self.published or [self.key.as_dict(private=False)]}
        if path == "/me":
            return 200, {"sub": "1030", **self.user_info}
        return 200, {"access_token": "opaque", "token_type": "Bearer", "id_token": self.id_token()}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            path = head[0].split(" ")[1]
            self.asked.append(Asked(path, headers, dict(parse_qsl(body.decode()))))
            answer = self._answer(path)
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
                # Neither more nor an end: a slow issuer.
                await reader.read()
                return
            status, content = answer
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            writer.write(
                f"HTTP/1.1 {status} Status\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n".encode() + text
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def hand_made_issuer() -> AsyncIterator[HandMadeIssuer]:
    """Yield an issuer that answers anything a test wants, on loopback."""
    issuer = HandMadeIssuer()
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        task.add_done_callback(serving.discard)
        await issuer.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield issuer
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await server.wait_closed()


@dataclass
class Provider:
    """A running oidc-provider. Its people sign in by their names; `people` has their claims."""

    url: str
    configuration: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = self.configuration.with_suffix(".log")
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                ["node", str(ROOT / "tests" / "console" / "openid_provider" / "provider.mjs"), str(self.configuration)],
                env={**os.environ, "HALFNOTE_TEST_PROVIDER": str(PROVIDER)},
                stdout=out,
                stderr=out,
            )
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                httpx.get(f"{self.url}/.well-known/openid-configuration", trust_env=False).raise_for_status()
                return
            except httpx.TransportError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(log.read_text()) from None
                time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(timeout=WITHIN_S)


@contextmanager
def provider(
    directory: Path, redirect_uri: str, people: dict[str, dict[str, Any]], **configuration: Any
) -> Iterator[Provider]:
    """Run oidc-provider with one client, `halfnote`, whose secret is `shared between both`. Skips without it."""
    if not (PROVIDER / "node_modules" / "oidc-provider").exists() or shutil.which("node") is None:
        absent("needs oidc-provider: Node, and make test-deps", "DEPS")
    port = free_port()
    # Another site than 127.0.0.1: browsers then keep back the cookies that are `SameSite=Strict`.
    started = Provider(f"http://localhost:{port}", directory / "provider.json")
    started.configuration.write_text(
        json.dumps(
            {"issuer": started.url, "port": port, "redirect_uri": redirect_uri, "people": people, **configuration}
        )
    )
    started.start()
    try:
        yield started
    finally:
        started.stop()
