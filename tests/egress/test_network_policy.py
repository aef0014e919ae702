"""Which addresses Halfnote dials: every form of docs/security.md on real sockets, and each setting of the rules."""

import asyncio
import ipaddress
import json
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.config import LOOPBACK, Settings
from app.delivery import Delivered, Failed
from app.egress.denied_addresses import METADATA, denied_reason, inner_addresses
from app.egress.http_client import callback_client
from app.egress.network_policy import AddressRefused, NetworkPolicy
from tests.support.check_responder import RawServer, plain
from tests.support.deliveries import NOW, certificate, delivery
from tests.support.dns_server import AAAA, A, NameServer, ask
from tests.support.network_namespace import BROKERS
from tests.support.processes import ROOT
from tests.support.requirements import absent
from tests.support.webhooks import egress_client, message, networks_of, webhook

PAGE = (ROOT / "docs" / "security.md").read_text()
UNSHARE = shutil.which("unshare")
ROWS = re.findall(r"^\| (.*?) \| `(http.*?)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)


def settings(**fields: Any) -> Settings:
    return Settings(_env_file=None, **fields)


def hosts_of_rows() -> list[str]:
    """Return the hosts of the page's URLs that are valid for a broker: ASCII. Rebinding has its own cases."""
    plain_urls = [url.replace("PORT", "1") for _, url, _, _ in ROWS if not {"@", "\\", "#"} & set(url)]
    hosts = [urlsplit(url).netloc.rpartition(":")[0].strip("[]") for url in plain_urls]
    return [host for host in hosts if host.isascii() and "%" not in host and host not in ("8.8.8.8", "rebind.test")]


def run_in_namespace(urls: Sequence[str], hosts: Sequence[str]) -> Any:
    """Try URLs and broker hosts in a namespace where every address is local; skip where that is impossible."""
    inside = [UNSHARE or "", "-Urnm"]
    if UNSHARE is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        absent("no namespaces of users, networks and mounts here: `unshare -Urnm true` fails", "MACHINE")
    request = json.dumps({"urls": urls, "hosts": hosts})
    completed = subprocess.run(
        [*inside, sys.executable, "-m", "tests.support.network_namespace"],
        cwd=ROOT,
        input=request,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_every_form_of_the_page_is_refused_before_a_socket_is_connected() -> None:
    assert len(ROWS) > 80
    hosts = hosts_of_rows()
    seen = run_in_namespace([url for _, url, _, _ in ROWS], hosts)
    for (form, url, error, opened), case in zip(ROWS, seen["urls"], strict=True):
        assert case["url"] == url
        assert case["reached"] == [], form
        assert error in case["error"], form
        assert opened == (f"reaches {case['opened'][0]}" if case["opened"] else "stays out"), form
    assert len(seen["brokers"]) == len(BROKERS) * (len(hosts) + 1)
    for case in seen["brokers"]:
        assert case["reached"] == [], case
    refused = [case for case in seen["brokers"] if "HALFNOTE_ALLOW_NETWORKS" in case["error"]]
    assert {case["host"] for case in refused} >= {
        "2130706433",
        "127.1",
        "0",
        "127.0.0.1",
        "metadata.test",
        "::ffff:127.0.0.1",
    }
    assert {f"rebind-{kind}.test" for kind in BROKERS} <= {case["host"] for case in refused}


def test_the_page_has_every_kind_of_form() -> None:
    forms = " ".join(form for form, *_ in ROWS).lower()
    for kind in (
        "decimal",
        "octal",
        "hexadecimal",
        "mapped",
        "6to4",
        "nat64",
        "rebinding",
        "redirect",
        "teredo",
        "idna",
    ):
        assert kind in forms


FORMS = (
    lambda inner: inner,
    lambda inner: 0xFFFF << 32 | inner,
    lambda inner: 0xFFFF << 48 | inner,
    lambda inner: 0x0064_FF9B << 96 | inner,
    lambda inner: 0x0064_FF9B_0001 << 80 | inner,
    lambda inner: 0x2002 << 112 | inner << 80 | 1,
    lambda inner: 0x2001_0000 << 96 | 0x0808_0808 << 64 | (inner ^ 0xFFFF_FFFF),
    lambda inner: 0x2A00_1450 << 96 | 0x5EFE << 32 | inner,
)
EVERY_IPV6 = networks_of("::/0")


@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMS))
def test_an_address_within_an_opened_form_is_checked_too(inner: int, form: Any) -> None:
    address = ipaddress.IPv4Address(inner)
    whole = ipaddress.IPv6Address(form(inner))
    if int(whole) in (0, 1):
        return
    assert address in inner_addresses(whole)
    assert (denied_reason(str(whole), EVERY_IPV6) is None) == (denied_reason(str(address), EVERY_IPV6) is None)


@given(st.ip_addresses())
def test_addresses_that_python_calls_private_are_denied_and_ipv6_must_be_global_unicast(address: Any) -> None:
    if address in ipaddress.ip_network("2000::/3" if address.version == 6 else "0.0.0.0/0") and address.is_global:
        return
    assert denied_reason(str(address), ()) is not None


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001:82a::200e"])
def test_public_addresses_are_allowed_unless_denied(address: str) -> None:
    assert denied_reason(address, ()) is None
    assert denied_reason(address, (), networks_of("0.0.0.0/0", "::/0")) == "in HALFNOTE_DENY_NETWORKS"
    assert denied_reason(address, networks_of(address), networks_of("0.0.0.0/0", "::/0")) is None


@pytest.mark.parametrize("address", [address for address, _ in METADATA])
def test_metadata_is_opened_by_its_own_address_alone(address: str) -> None:
    supernet = ipaddress.ip_network(address).supernet(8)
    assert "metadata" in (denied_reason(address, [supernet, *networks_of("0.0.0.0/0", "::/0")]) or "")
    assert denied_reason(address, networks_of(address)) is None


def test_loopback_is_open_by_default_only_with_the_embedded_postgres() -> None:
    assert settings().opened_networks == LOOPBACK
    assert settings(database_url="postgresql://elsewhere/halfnote").opened_networks == ()
    assert settings(allow_networks="").opened_networks == ()
    assert settings(database_url="postgresql://elsewhere/halfnote", allow_networks="10.0.0.0/8").opened_networks == (
        "10.0.0.0/8",
    )


@asynccontextmanager
async def recording_server(address: str, port: int = 0) -> AsyncIterator[tuple[int, list[str]]]:
    """Listen at an address and answer 204 to all; yield the port and the local addresses of accepted connections."""
    accepted: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer.get_extra_info("sockname")[0])
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, address, port)
    try:
        yield server.sockets[0].getsockname()[1], accepted
    finally:
        server.close()
        await server.wait_closed()


def policy_with_names_from(server: NameServer, *opened: str) -> NetworkPolicy:
    """Return rules that resolve names by a DNS server, with 127.0.0.2 opened."""

    async def lookup(host: str) -> list[str]:
        return [address for kind in (A, AAAA) for address in await ask(server.port, host, kind)]

    return NetworkPolicy(opened=networks_of(*opened), lookup=lookup)


async def test_a_name_that_resolves_to_another_address_the_second_time_is_refused() -> None:
    answers = {"shop.test": [["127.0.0.2"], ["127.0.0.1"]]}
    async with NameServer(answers) as names, recording_server("0.0.0.0") as (port, accepted):
        replies = []
        for _ in range(2):
            async with callback_client(policy_with_names_from(names, "127.0.0.2/32")) as client:
                replies.append(await client.call(f"http://shop.test:{port}/", b"{}", {}, timeout_s=30))
        assert names.asked["shop.test", A] == 2
    assert replies[0].status == 204
    assert replies[1].unreachable
    assert replies[1].error == "127.0.0.1 is loopback, and HALFNOTE_ALLOW_NETWORKS does not open it"
    assert accepted == ["127.0.0.2"]


@pytest.mark.parametrize("kind", BROKERS)
async def test_the_address_of_a_broker_is_checked_at_each_connection(kind: str) -> None:
    async with (
        NameServer({"broker.test": [["127.0.0.2"], ["127.0.0.1"]]}) as names,
        recording_server("0.0.0.0") as (port, accepted),
    ):
        at, scheme = f"broker.test:{port}", {"rabbitmq": "amqp"}.get(kind, kind)
        stored = {"type": kind, "bootstrap": [at]} if kind == "kafka" else {"type": kind, "url": f"{scheme}://{at}"}
        destination = BROKERS[kind](stored, {}, 30, policy_with_names_from(names, "127.0.0.2/32"))
        outcomes = [(await destination.deliver([delivery()], NOW))[0] for _ in range(2)]
        await destination.close()
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert isinstance(outcomes[1], Failed)
    assert "127.0.0.1 is loopback, and HALFNOTE_ALLOW_NETWORKS does not open it" in outcomes[1].error
    assert set(accepted) == {"127.0.0.2"}


async def test_only_the_allowed_addresses_of_a_name_are_tried() -> None:
    async with (
        NameServer({"both.test": [["127.0.0.1", "127.0.0.2"]]}) as names,
        recording_server("127.0.0.1") as (port, accepted),
    ):
        rules = policy_with_names_from(names, "127.0.0.2/32")
        assert await rules.resolved("both.test", port, encrypted=False) == ["127.0.0.2"]
        async with callback_client(rules) as client:
            reply = await client.call(f"http://both.test:{port}/", b"{}", {}, timeout_s=30)
    assert reply.unreachable
    assert accepted == []


async def test_a_redirect_is_not_followed_even_to_an_allowed_address() -> None:
    async with recording_server("127.0.0.1") as (port, accepted), egress_client() as client:
        moved = plain(307, location=f"http://127.0.0.1:{port}/inside")
        async with RawServer(moved) as redirecting:
            reply = await client.call(redirecting.url, b"{}", {}, timeout_s=30)
    assert (reply.status, accepted) == (307, [])


async def test_denied_ports_are_open_only_to_their_own_brokers() -> None:
    rules = NetworkPolicy(opened=networks_of(*LOOPBACK), denied_ports=frozenset({6379, 7001}))
    async with callback_client(rules) as client:
        reply = await client.call("http://127.0.0.1:6379/", b"", {}, timeout_s=30)
    assert reply.unreachable
    assert "6379" in (reply.error or "")
    assert "HALFNOTE_DENY_PORTS" in (reply.error or "")
    own = frozenset({6379})
    assert await rules.resolved("127.0.0.1", 6379, own_ports=own, encrypted=False) == ["127.0.0.1"]
    with pytest.raises(AddressRefused, match="HALFNOTE_DENY_PORTS"):
        await rules.resolved("127.0.0.1", 7001, own_ports=own, encrypted=False)


async def test_with_https_only_nothing_is_sent_in_plain_text() -> None:
    async with recording_server("127.0.0.1") as (port, accepted), egress_client(https_only=True) as client:
        reply = await client.call(f"http://127.0.0.1:{port}/", b"{}", {}, timeout_s=30)
        rules = NetworkPolicy(opened=networks_of(*LOOPBACK), encrypted_only=True)
        for kind, of in BROKERS.items():
            at, scheme = f"127.0.0.1:{port}", {"rabbitmq": "amqp"}.get(kind, kind)
            stored = {"type": kind, "bootstrap": [at]} if kind == "kafka" else {"type": kind, "url": f"{scheme}://{at}"}
            destination = of(stored, {}, 30, rules)
            [outcome] = await destination.deliver([delivery()], NOW)
            await destination.close()
            assert isinstance(outcome, Failed)
            assert "HALFNOTE_HTTPS_ONLY" in outcome.error
    assert reply.unreachable
    assert "HALFNOTE_HTTPS_ONLY" in (reply.error or "")
    assert accepted == []


@asynccontextmanager
async def mutual_tls_server(directory: Path, trusted: Path) -> AsyncIterator[tuple[str, Path, list[Any]]]:
    """Serve TLS only to clients with a certificate; yield the URL, its certificate, and the clients' subjects."""
    directory.mkdir()
    server_certificate, key = certificate(directory, "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(trusted)
    subjects: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            subjects.append(writer.get_extra_info("peercert")["subject"])
            writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client has no certificate
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}/in", server_certificate, subjects
    finally:
        server.close()
        await server.wait_closed()


async def test_a_configured_ca_and_client_certificate(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    certificate_file, key_file = certificate(tmp_path / "client", "halfnote")
    async with mutual_tls_server(tmp_path / "server", certificate_file) as (url, ca, subjects):
        client_certificate = {"tls_cert_file": certificate_file, "tls_key_file": key_file}
        async with egress_client(https_only=True, tls_ca_file=ca, **client_certificate) as client:
            [outcome] = await webhook(client, url, timeout_s=30).deliver([message()], NOW)
        async with egress_client(**client_certificate) as client:
            unknown = await client.call(url, b"{}", {}, timeout_s=30)
        async with egress_client(tls_ca_file=ca) as client:
            anonymous = await client.call(url, b"{}", {}, timeout_s=30)
    assert isinstance(outcome, Delivered)
    assert subjects == [((("commonName", "halfnote"),),)]
    assert (unknown.status, unknown.unreachable) == (None, True)
    assert "certificate verify failed" in (unknown.error or "")
    assert anonymous.status is None


async def test_a_dialed_address_is_verified_by_the_name_it_was_resolved_from(tmp_path: Path) -> None:
    """Kafka's client does so: it knows only the address."""
    (tmp_path / "client").mkdir()
    certificate_file, key_file = certificate(tmp_path / "client", "halfnote")
    async with mutual_tls_server(tmp_path / "server", certificate_file) as (url, ca, _):
        rules = NetworkPolicy(ca_file=ca, cert_file=certificate_file, key_file=key_file)
        port = urlsplit(url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=rules.named_tls("localhost"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 204 No Content\r\n"
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", port, ssl=rules.named_tls("elsewhere.test"))


@pytest.mark.parametrize(
    "fields",
    [
        {"tls_ca_file": "/no/such/file"},
        {"tls_key_file": __file__},
        {"proxy_url": "https://proxy:3128"},
        {"proxy_url": "http://us:pass-word@proxy:3128/path"},
        {"deny_ports": "22,http"},
        {"deny_networks": "10.0.0.1/8"},
    ],
)
def test_invalid_settings_are_refused_at_the_start(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        settings(**fields)
    assert "pass-word" not in str(refused.value)


@asynccontextmanager
async def http_proxy() -> AsyncIterator[tuple[int, list[str], list[str]]]:
    """Run an HTTP proxy that connects to nothing; yield its port, the request lines, and the authorizations."""
    request_lines: list[str] = []
    authorizations: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_lines.append(head.split("\r\n")[0])
        authorizations.extend(
            line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("proxy-auth")
        )
        answer = "403 Forbidden" if request_lines[-1].startswith("CONNECT") else "204 No Content"
        writer.write(f"HTTP/1.1 {answer}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], request_lines, authorizations
    finally:
        server.close()
        await server.wait_closed()


async def test_callbacks_use_the_configured_proxy() -> None:
    async with (
        http_proxy() as (port, request_lines, authorizations),
        egress_client("", proxy_url=f"http://us:word@127.0.0.1:{port}") as client,
    ):
        plain_text = await client.call("http://shop.test/in", b"{}", {}, timeout_s=30)
        tunnel = await client.call("https://shop.test/in?token=hidden", b"{}", {}, timeout_s=30)
        inside = await client.call("http://10.0.0.5/", b"{}", {}, timeout_s=30)
        denied_port = await client.call("http://shop.test:22/", b"{}", {}, timeout_s=30)
    assert request_lines == ["POST http://shop.test/in HTTP/1.1", "CONNECT shop.test:443 HTTP/1.1"]
    assert authorizations == ["Basic dXM6d29yZA=="] * 2
    assert plain_text.status == 204
    assert (tunnel.unreachable, tunnel.error) == (True, "HALFNOTE_PROXY_URL answered 403")
    assert inside.unreachable
    assert "HALFNOTE_ALLOW_NETWORKS" in (inside.error or "")
    assert "HALFNOTE_DENY_PORTS" in (denied_port.error or "")


async def test_no_proxy_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_proxy() as (port, request_lines, _), recording_server("127.0.0.1") as (port_of_server, accepted):
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        async with egress_client() as client:
            reply = await client.call(f"http://127.0.0.1:{port_of_server}/", b"{}", {}, timeout_s=30)
    assert (reply.status, request_lines, accepted) == (204, [], ["127.0.0.1"])
