"""Bodies of messages: their digests, and their compression."""

import hashlib
import zlib

from app.rocketmq.protocol.definition_pb2 import Code, Digest, DigestType, Encoding, Message
from app.rocketmq.refusals import CallRefused


def body_of(message: Message, limit: int) -> bytes:
    """Return a sent message's body, checked and uncompressed. `limit`: bytes, of both forms. Raises CallRefused."""
    body = message.body
    if not body:
        raise CallRefused(Code.MESSAGE_BODY_EMPTY, "The message's body is empty.")
    if len(body) > limit:
        raise _too_large(limit)
    _check_digest(message.system_properties.body_digest, body)
    if message.system_properties.body_encoding != Encoding.GZIP:
        return body
    return _uncompressed(body, limit)


def digest_of(body: bytes) -> Digest:
    """Return the digest with which a body is delivered. MD5 is what RocketMQ's proxy sends and all clients know."""
    return Digest(type=DigestType.MD5, checksum=_hex(hashlib.md5(body, usedforsecurity=False)))


def _uncompressed(body: bytes, limit: int) -> bytes:
    # Readers of other protocols would not know that it is compressed.
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise CallRefused(Code.MESSAGE_CORRUPTED, f"The body is not the gzip that it is said to be: {error}.") from None
    if len(plain) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise CallRefused(Code.MESSAGE_CORRUPTED, "The body's gzip ends early.")
    return plain


def _too_large(limit: int) -> CallRefused:
    return CallRefused(Code.MESSAGE_BODY_TOO_LARGE, f"A message's body has at most {limit} bytes (--max-body-bytes).")


def _check_digest(digest: Digest, body: bytes) -> None:
    checksum = digest.checksum.strip().upper()
    if not checksum or digest.type == DigestType.DIGEST_TYPE_UNSPECIFIED:
        return
    if digest.type == DigestType.CRC32:
        # Clients write it in three ways: with leading zeros, without, and (Node) in decimal.
        number = zlib.crc32(body)
        fits = checksum in (f"{number:08X}", f"{number:X}", str(number))
    elif digest.type == DigestType.MD5:
        fits = checksum == _hex(hashlib.md5(body, usedforsecurity=False))
    else:
        fits = checksum == _hex(hashlib.sha1(body, usedforsecurity=False))
    if not fits:
        raise CallRefused(Code.MESSAGE_CORRUPTED, "The body's digest is another one than the message says.")


def _hex(digest: "hashlib._Hash") -> str:
    return digest.hexdigest().upper()
