"""What ends a run, said so that a person knows what to do."""


class RunFailedError(Exception):
    """The run cannot go on; the text is for a person and has no password in it."""


class BusyError(RunFailedError):
    """Another run is going on."""


class SnapshotLostError(RunFailedError):
    """What was read so far counts no more, but a new snapshot may do."""
