"""Each process stores the largest difference between an id's time and a birth that was ever permitted."""

import pytest

from app.database.connection import Connection
from app.store.proof.shared_settings import LONGEST_ID_SKEW, read_rule
from tests.conftest import assembled, settings_of


@pytest.mark.parametrize(("starts", "known"), [((300,), 300), ((300, 900), 900), ((900, 300), 900)])
async def test_the_largest_that_any_process_permitted_is_kept(
    dsn: str, db: Connection, starts: tuple[int, ...], known: int
) -> None:
    for id_skew_s in starts:
        async with assembled(settings_of(dsn, id_skew_s=id_skew_s), dsn):
            pass
    assert await read_rule(db, LONGEST_ID_SKEW) == known
