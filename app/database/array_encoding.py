"""Has asyncpg encode arrays in less than half the time.

asyncpg asks of each element of an array whether it is an array itself. It asks an abstract base class, in Python. For a
batch of half messages these questions take more time than the encoding (decision 0064).
"""

from asyncpg.protocol import protocol

# What may be passed as an array. asyncpg refuses other iterables then, such as sets and views of dictionaries.
ARRAYS = (list, tuple)


def ask_by_type() -> None:
    """Let asyncpg take lists and tuples alone for arrays. Without its name for the question nothing changes."""
    if hasattr(protocol, "IterableABC"):
        protocol.IterableABC = ARRAYS
