"""Tools for the tests of services that use Halfnote.

`Coordinator`: a coordinator in memory, with the service's semantics; use it by `transport=coordinator.transport()`.
`coordinator.subscriptions`: those whose consumers claim, each a `Pulled`.
`signed_check`, `signed_ping`, `signed_delivery`: requests like those of the service, for your own endpoints.
`halfnote.testing.fixtures`: a pytest fixture that starts the real service (needs `halfnote-server`).
"""

from halfnote.testing.coordinator import Coordinator
from halfnote.testing.pulled import Pulled
from halfnote.testing.signed import SECRET, signed_check, signed_delivery, signed_ping
from halfnote.testing.stored import Stored

__all__ = ["SECRET", "Coordinator", "Pulled", "Stored", "signed_check", "signed_delivery", "signed_ping"]
