"""Loads the service's own certificate again when its files changed, and exports until when it is valid."""

import asyncio
from datetime import datetime

import structlog

from app.runtime.loop_runner import StepResult
from app.runtime.server_certificate import ServerCertificate
from app.runtime.state import Runtime

log = structlog.get_logger(__name__)


class CertificateReloads:
    """The warnings about the certificate that were logged already."""

    def __init__(self, certificate: ServerCertificate) -> None:
        self._certificate = certificate
        self._logged: set[str] = set()

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Load the files if they changed, log what is new, and set the gauges."""
        certificate, metrics = self._certificate, runtime.metrics.process
        # In a thread: the files may be on a slow volume.
        if changed := await asyncio.to_thread(certificate.reload):
            self._log_reload()
        warnings = set(certificate.warnings(now))
        for warning in sorted(warnings - self._logged):
            log.warning("tls_certificate", detail=warning)
        self._logged = warnings
        metrics.tls_expires.labels(certificate.file).set(certificate.expires_at.timestamp())
        metrics.tls_not_reloaded.labels(certificate.file).set(certificate.fault is not None)
        return StepResult(done=int(changed))

    def _log_reload(self) -> None:
        if self._certificate.fault is None:
            log.info("tls_certificate_reloaded", expires_at=self._certificate.expires_at.isoformat())
        else:
            log.error("tls_certificate_not_reloaded", because=self._certificate.fault)
