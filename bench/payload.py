"""The requests of all rows: ids that the client chooses, bodies of about 300 bytes."""

import os
import time
from uuid import UUID

GROUP = "shop"
TOPIC = "order"
BODY_BYTES = 300
# How many ids share a millisecond: about the rate of the fastest rows.
IDS_A_MS = 20

_ID = "00000000-0000-7000-8000-000000000000"


def transaction_ids(count: int, now_ms: int | None = None) -> list[str]:
    """Return `count` UUIDv7 in order of time, random within a millisecond. The last one's time is `now_ms` (or now).

    `count` must stay below 5 minutes of ids (6 million), so that the coordinator accepts each as a new id.
    """
    last = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    noise = os.urandom(10 * count).hex()
    return [_uuid7(last - (count - index) // IDS_A_MS, noise[20 * index : 20 * index + 20]) for index in range(count)]


def _uuid7(ms: int, noise: str) -> str:
    time_, variant = f"{ms:012x}", "89ab"[int(noise[3], 16) & 3]
    return f"{time_[:8]}-{time_[8:]}-7{noise[:3]}-{variant}{noise[4:7]}-{noise[8:]}"


def half_body(transaction_id: str = _ID) -> bytes:
    """Return the body of a `/half`: BODY_BYTES long, one message."""
    head = f'{{"transaction_id":"{transaction_id}","producer_group":"{GROUP}","messages":[{{"topic":"{TOPIC}",'
    head += '"key":"customer-77","body":{"order":1030,"amount":"129.90","currency":"EUR","note":"'
    tail = '"}}]}'
    return (head + "x" * (BODY_BYTES - len(head) - len(tail)) + tail).encode()


def end_body(transaction_id: str = _ID) -> bytes:
    """Return the body of an `/end` that commits."""
    return f'{{"transaction_id":"{transaction_id}","producer_group":"{GROUP}","verdict":"commit"}}'.encode()


def request(path: str, body: bytes, port: int, key: str | None = None) -> bytes:
    """Return a whole HTTP request for a connection that stays open, with an API key if there is one."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def template(path: str, body: bytes, port: int, key: str | None = None) -> tuple[bytes, bytes]:
    """Return the parts of a request before and after its transaction_id."""
    before, _, after = request(path, body, port, key).partition(_ID.encode())
    return before, after


def message_of(body: bytes) -> bytes:
    """Return the message body in the body of a `/half`, as the service stores it."""
    return body.partition(b'"body":')[2].removesuffix(b"}]}")


def as_uuids(ids: list[str]) -> list[UUID]:
    """Return ids in the type of the database driver."""
    return [UUID(id_) for id_ in ids]
