"""Shared by the tests of brokers: deliveries, certificates, and the open tasks and sockets of this process."""

import asyncio
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.delivery import Delivery
from app.egress.denied_addresses import Network

NOW = datetime(2026, 11, 21, 10, 0, 1, tzinfo=UTC)
COMMITTED = datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC)
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"),)
ELSEWHERE: tuple[Network, ...] = (ipaddress.ip_network("10.0.0.0/8"),)


def delivery(**fields: Any) -> Delivery:
    """Return a delivery of the subscription `orders-out`; `fields` replace its fields."""
    transaction_id = uuid4()
    defaults: dict[str, Any] = {
        "subscription": "orders-out",
        "message_id": f"{transaction_id}-0",
        "transaction_id": transaction_id,
        "offset": 1030,
        "producer_group": "shop",
        "topic": "order",
        "key": "order-1030",
        "tag": None,
        "headers": {},
        "content_type": "application/json",
        "body": b'{"order": 1030}',
        "committed_at": COMMITTED,
        "attempt": 1,
    }
    return Delivery(**{**defaults, **fields})


def full_delivery(topic: str) -> Delivery:
    """Return a delivery with every optional field."""
    return delivery(
        topic=topic,
        key='café "1"',
        tag="new",
        headers={"trace": "50% öff"},
        content_type="application/octet-stream",
        body=bytes(range(256)),
        attempt=3,
        replay="7",
    )


def full_attributes(sent: Delivery) -> dict[str, bytes]:
    """Return the attributes of a `full_delivery` as Kafka's record headers and Redis's fields have them."""
    return {
        "content-type": b"application/octet-stream",
        "ce_specversion": b"1.0",
        "ce_id": sent.message_id.encode(),
        "ce_source": b"/producer-groups/shop",
        "ce_type": sent.topic.encode(),
        "ce_subject": 'café "1"'.encode(),
        "ce_time": b"2026-11-21T10:00:00.123456Z",
        "ce_halfnotetransaction": str(sent.transaction_id).encode(),
        "ce_halfnoteoffset": str(sent.offset).encode(),
        "ce_halfnoteattempt": b"3",
        "ce_halfnotesubscription": b"orders-out",
        "ce_halfnotetag": b"new",
        "ce_halfnotereplay": b"7",
        "halfnote-transaction": str(sent.transaction_id).encode(),
        "halfnote-offset": str(sent.offset).encode(),
        "halfnote-attempt": b"3",
        "halfnote-subscription": b"orders-out",
        "halfnote-tag": b"new",
        "halfnote-replay": b"7",
        "halfnote-h-trace": "50% öff".encode(),
    }


def open_tasks_and_sockets() -> tuple[set[asyncio.Task[Any]], set[int]]:
    """Return the tasks of this loop and the TCP sockets of this process, by their descriptors."""
    return asyncio.all_tasks(), {connection.fd for connection in psutil.Process().net_connections("tcp")}


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Create a self-signed certificate for a host name; return its file and the file of its key, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = directory / "certificate.pem", directory / "key.pem"
    certificate_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file
