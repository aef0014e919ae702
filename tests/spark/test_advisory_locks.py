"""The proof's advisory locks are the ones that the service's list names, and no number stands anywhere else."""

import re

from app.database.advisory_locks import AdvisoryLock
from spark.archive.records import ARCHIVE_LOCK
from spark.postgres.connections import RUN_LOCK
from tests.support.processes import ROOT

_numbered = re.compile(r"pg_(?:try_)?advisory_\w+\(\s*[0-9]").search


def test_the_proof_and_the_service_name_the_same_locks() -> None:
    assert (RUN_LOCK, ARCHIVE_LOCK) == (AdvisoryLock.PROOF, AdvisoryLock.ARCHIVE)


def test_locks_are_taken_by_name() -> None:
    sources = [
        path for folder in ("app", "spark", "migrations", "bench", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 300
    assert [str(path) for path in sources if _numbered(path.read_text())] == []
