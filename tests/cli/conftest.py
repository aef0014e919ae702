"""One service for all tests of the command line, each of which uses names of its own."""

from collections.abc import Iterator

import pytest

from tests.conftest import migrated_template
from tests.support import postgres
from tests.support.processes import serving


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    """The service's database."""
    made = postgres.create_database(migrated_template())
    yield made
    postgres.drop_database(made)


@pytest.fixture(scope="session")
def url(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the service, which `run` calls."""
    with serving(tmp_path_factory.mktemp("service"), database) as url:
        yield url
