"""Most tests trust no public CA: reading the system's list takes each runtime, client and service 50 ms of CPU.

Tests of TLS name their own CA. Tests that download trust what the system trusts.
"""

import os
from pathlib import Path

# Files and folders below tests/ whose tests start programs that download: pip, podman, Go, npm.
DOWNLOADING = (
    "tests/helm/",
    "tests/images/",
    "tests/project/test_dependency_audit.py",
    "tests/project/test_sbom.py",
    "tests/sdk/test_distribution.py",
    "tests/sdk/test_python_310.py",
    "tests/spark/test_bucket.py",
    "tests/system/test_compose.py",
    "tests/system/test_images.py",
)

_VARIABLE = "SSL_CERT_FILE"
_SYSTEM = os.environ.get(_VARIABLE)
# A certificate whose key was thrown away.
_UNUSED = str(Path(__file__).with_name("unused_ca.pem"))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Choose what OpenSSL trusts in this process, and in those that the test starts."""
    if not nodeid.startswith(DOWNLOADING):
        os.environ[_VARIABLE] = _UNUSED
    elif _SYSTEM is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _SYSTEM
