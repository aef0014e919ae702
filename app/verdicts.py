"""The words that rows and answers share: verdicts, who gave them, and the states of a transaction."""

from enum import IntEnum, StrEnum


class Verdict(IntEnum):
    """A recorded verdict, as stored in `op.verdict`. There is no `unknown`: it is never recorded."""

    COMMIT = 1
    ROLLBACK = 2

    @property
    def word(self) -> str:
        """The verdict as HTTP spells it."""
        return self.name.lower()


class Source(IntEnum):
    """Who gave a verdict, as stored in `op.source`."""

    PRODUCER = 0
    CHECK = 1
    POLICY = 2
    OPERATOR = 3

    @property
    def word(self) -> str:
        """The source as HTTP spells it."""
        return self.name.lower()


# By what rows hold. Reading an enumeration's member takes ten times as long, and every end asks for two words.
VERDICT_WORDS: dict[int, str] = {verdict: verdict.word for verdict in Verdict}
SOURCE_WORDS: dict[int, str] = {source: source.word for source in Source}


class State(StrEnum):
    """Where a transaction stands (design: states)."""

    HALF = "half"
    IN_DOUBT = "in_doubt"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


class CheckBackState(IntEnum):
    """`check_back.state`: policy works on the first and leaves the second to people and the producer."""

    IN_DOUBT = 1
    PARKED = 2


class AttemptKind(StrEnum):
    """What an `attempt` row tells of."""

    CHECK = "check"
    DELIVERY = "delivery"
    REFUSED = "refused"
    SWEPT = "swept"
    PARKED = "parked"
