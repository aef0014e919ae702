"""The errors of failed reads."""

from spark.errors import RunFailedError, SnapshotLostError
from spark.postgres.standby import cancelled_by_replay


def read_failure(error: Exception, *, standby: bool) -> RunFailedError:
    """Return the error of a failed read: SnapshotLostError if a new snapshot may help."""
    said = root_cause(str(error))
    if cancelled_by_replay(str(error), standby=standby):
        return SnapshotLostError(f"The standby cancelled a read: {said}")
    return RunFailedError(f"A read failed: {said}")


def root_cause(said: str) -> str:
    """Return the line of a Java stack trace with the innermost cause."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        # The first line is about Py4J's own call.
        lines = [lines[1].removeprefix(": "), *lines[2:]]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (causes or lines or ["unknown"])[-1 if causes else 0]
