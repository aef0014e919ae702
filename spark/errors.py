"""The errors that end a run; their texts say what to do."""


class RunFailedError(Exception):
    """The run cannot continue. The text is for a person and contains no password."""


class DamagedError(RunFailedError):
    """Files to read are damaged, so nothing can be said of their rows."""


class BusyError(RunFailedError):
    """Another run is active."""


class SnapshotLostError(RunFailedError):
    """The snapshot is lost, and the rows read from it are useless. A new snapshot may succeed."""
