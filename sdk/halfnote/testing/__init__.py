"""For the tests of services that use Halfnote.

`Coordinator`: one in memory, with the service's semantics; producers take `transport=coordinator.transport()`.
`signed_check`, `signed_ping`, `signed_delivery`: requests as the service makes them, for one's own endpoints.
`halfnote.testing.fixtures`: a pytest fixture that starts the real service (needs `halfnote-server`).
"""

from halfnote.testing.coordinator import Coordinator
from halfnote.testing.signed import SECRET, signed_check, signed_delivery, signed_ping
from halfnote.testing.stored import Stored

__all__ = ["SECRET", "Coordinator", "Stored", "signed_check", "signed_delivery", "signed_ping"]
