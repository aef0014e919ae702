"""The result of one health check and of all of them. Values only."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The result of one check. `detail` says what was found and, if it is not ok, what to do."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """The results of all checks. Only `checks` decide readiness; `warnings` do not."""

    checks: list[HealthCheck]
    warnings: list[HealthCheck]

    @property
    def ready(self) -> bool:
        """True if every check is ok."""
        return all(check.ok for check in self.checks)


DatabaseFound: TypeAlias = tuple[list[HealthCheck], list[HealthCheck]]
