"""Convert columns of numbers to Arrow arrays: ids, digests and times as text in Postgres's format."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

# The value for null.
NONE = np.iinfo(np.int64).min
UTC_TIME = pa.timestamp("us", tz="UTC")

_HEX = np.array([f"{n:02x}".encode() for n in range(256)], dtype="S2").view(np.uint8).reshape(256, 2)
# The places of an id's 32 digits among its 36 characters.
_DIGITS = np.array([at for at in range(36) if at not in (8, 13, 18, 23)])


def uuid7s(rng: np.random.Generator, milliseconds: Ints) -> Words:
    """Return UUIDv7 for Unix times in ms, each as two words: shape (n, 2), high word first."""
    noise = rng.integers(0, 2**63, size=(len(milliseconds), 2), dtype=np.int64).astype(np.uint64)
    high = (milliseconds.astype(np.uint64) << np.uint64(16)) | np.uint64(0x7000) | (noise[:, 0] & np.uint64(0xFFF))
    low = np.uint64(0x8000000000000000) | (noise[:, 1] & np.uint64(0x3FFFFFFFFFFFFFFF))
    return np.stack([high, low], axis=1)


def id_texts(ids: Words) -> pa.Array:
    """Return ids in canonical form."""
    octets = np.ascontiguousarray(ids.astype(">u8")).view(np.uint8).reshape(-1, 16)
    texts = np.full((len(ids), 36), ord("-"), dtype=np.uint8)
    texts[:, _DIGITS] = _HEX[octets].reshape(-1, 32)
    return _fixed(texts)


def bytea_texts(digests: pa.Array) -> pa.Array:
    r"""Return digests of 32 bytes in Postgres's text format of bytea: `\x` and hexadecimal digits."""
    filled = digests.fill_null(bytes(32))
    octets = np.frombuffer(filled.buffers()[2], dtype=np.uint8).reshape(-1, 32)
    texts = np.empty((len(octets), 66), dtype=np.uint8)
    texts[:, :2] = np.frombuffer(b"\\x", dtype=np.uint8)
    texts[:, 2:] = _HEX[octets].reshape(-1, 64)
    return pc.if_else(digests.is_null(), pa.scalar(None, pa.string()), _fixed(texts))


def binaries(digests: npt.NDArray[np.uint8], null: Bools | None = None) -> pa.Array:
    """Return digests of shape (n, 32) as binary values."""
    offsets = pa.py_buffer(np.arange(0, 32 * len(digests) + 1, 32, dtype=np.int32).tobytes())
    made = pa.Array.from_buffers(pa.binary(), len(digests), [None, offsets, pa.py_buffer(digests.tobytes())])
    return made if null is None else pc.if_else(pa.array(null), pa.scalar(None, pa.binary()), made)


def times(microseconds: Ints) -> pa.Array:
    """Return Unix times in µs as timestamps; NONE is null."""
    return pa.array(microseconds, mask=microseconds == NONE).cast(UTC_TIME)


def numbers(values: Ints, kind: pa.DataType) -> pa.Array:
    """Return numbers of a type; NONE is null."""
    return pa.array(np.where(values == NONE, 0, values), mask=values == NONE).cast(kind)


def words(codes: Ints, vocabulary: Sequence[str]) -> pa.Array:
    """Return the words for codes; NONE is null."""
    known = pa.array(list(vocabulary), pa.string())
    return known.take(pa.array(np.where(codes == NONE, 0, codes), mask=codes == NONE))


def _fixed(texts: npt.NDArray[np.uint8]) -> pa.Array:
    """Return rows of ASCII characters, all of the same length, as strings."""
    count, width = texts.shape
    offsets = pa.py_buffer(np.arange(0, width * count + 1, width, dtype=np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, pa.py_buffer(texts.tobytes())])
