"""A settle of which the relay does not know whether it was committed."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.relay.stream import Stream
from app.store.relay.results import Batch


@dataclass(frozen=True, slots=True)
class UnknownSettle:
    """A settle by its number, and the batches that it recorded if it was committed."""

    number: int
    recorded: Sequence[tuple[Stream, Batch]]

    @property
    def streams(self) -> set[Stream]:
        """The streams of the batches."""
        return {stream for stream, _ in self.recorded}
