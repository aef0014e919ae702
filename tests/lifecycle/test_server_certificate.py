"""The files of the service's own certificate: what is refused, what is warned of, and what a reload does."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PosixPath

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from app.cli.errors import Refusal
from app.cli.serve import settings_with
from app.cli.server_process import serve
from app.config import Settings
from app.runtime.server_certificate import BadCertificate, ServerCertificate
from tests.support.certificates import Authority
from tests.support.ports import free_port

Files = tuple[Path, Path]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    """A usable pair."""
    return authority.issue("127.0.0.1").write(tmp_path / "pair")


def without_certificate(files: Files, _: Authority) -> None:
    files[0].unlink()


def without_key(files: Files, _: Authority) -> None:
    files[1].unlink()


def with_a_directory(files: Files, _: Authority) -> None:
    files[1].unlink()
    files[1].mkdir()


def with_another_key(files: Files, authority: Authority) -> None:
    files[1].write_bytes(authority.issue("127.0.0.1").key)


def with_both_exchanged(files: Files, _: Authority) -> None:
    certificate, key = (file.read_bytes() for file in files)
    files[0].write_bytes(key)
    files[1].write_bytes(certificate)


def with_the_ca_first(files: Files, authority: Authority) -> None:
    files[0].write_bytes(authority.file.read_bytes() + files[0].read_bytes())


def with_no_key_in_it(files: Files, _: Authority) -> None:
    files[1].write_text("-----BEGIN PRIVATE KEY-----\nnone\n-----END PRIVATE KEY-----\n")


def with_an_encrypted_key(files: Files, _: Authority) -> None:
    key = load_pem_private_key(files[1].read_bytes(), None)
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


FAULTS = [
    (without_certificate, "HALFNOTE_TLS_CERT: .*tls.crt cannot be read: No such file"),
    (without_key, "HALFNOTE_TLS_KEY: .*tls.key cannot be read: No such file"),
    (with_a_directory, "HALFNOTE_TLS_KEY: .*tls.key cannot be read: Is a directory"),
    (with_another_key, "does not belong to the first certificate in .*tls.crt"),
    (with_the_ca_first, "does not belong to the first certificate in .*tls.crt"),
    (with_both_exchanged, "HALFNOTE_TLS_CERT: .*tls.crt has no certificate in PEM form"),
    (with_no_key_in_it, "HALFNOTE_TLS_KEY: .*tls.key has no private key in PEM form"),
    (with_an_encrypted_key, "is encrypted.*openssl pkey"),
]


@pytest.mark.parametrize(("spoil", "expected"), FAULTS)
def test_unusable_files_are_refused(
    files: Files, authority: Authority, spoil: Callable[[Files, Authority], None], expected: str
) -> None:
    spoil(files, authority)
    with pytest.raises(BadCertificate, match=expected):
        ServerCertificate(*files)


@pytest.mark.parametrize(("spoil", "expected"), FAULTS)
def test_a_reload_of_unusable_files_keeps_the_former_pair(
    files: Files, authority: Authority, spoil: Callable[[Files, Authority], None], expected: str
) -> None:
    certificate = ServerCertificate(*files)
    before, good = certificate.context, [file.read_bytes() for file in files]
    spoil(files, authority)
    assert certificate.reload()
    assert certificate.context is before
    [warning] = certificate.warnings(datetime.now(UTC))
    assert certificate.fault is not None
    assert certificate.fault in warning
    # The same fault is news once.
    assert not certificate.reload()
    for file, content in zip(files, good, strict=True):
        if file.is_dir():
            file.rmdir()
        file.write_bytes(content)
        file.chmod(0o600)
    assert certificate.reload()
    assert certificate.fault is None
    assert certificate.context is before


def test_an_expired_certificate_and_an_open_key_are_warned_of(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("127.0.0.1", valid=timedelta(hours=-1)).write(tmp_path / "pair")
    files[1].chmod(0o644)
    expired, readable = ServerCertificate(*files).warnings(datetime.now(UTC))
    assert "expired" in expired
    assert f"every user of the machine can read {files[1]}" in readable
    files[1].chmod(0o640)
    assert len(list(ServerCertificate(*files).warnings(datetime.now(UTC)))) == 1


def test_a_changed_permission_of_the_key_needs_no_restart(files: Files) -> None:
    """The warning names the command, and ends after it."""
    certificate = ServerCertificate(*files)
    for mode, warnings in ((0o644, 1), (0o640, 0)):
        files[1].chmod(mode)
        assert not certificate.reload()
        assert len(list(certificate.warnings(datetime.now(UTC)))) == warnings


class ChangingFile(PosixPath):
    """A file of which the next readings find `contents`, as if it were written meanwhile."""

    contents: Sequence[bytes] = ()

    def read_bytes(self) -> bytes:
        if not self.contents:
            return super().read_bytes()
        first, *self.contents = self.contents
        return first


@pytest.mark.parametrize("replaced", [1, 3])
def test_a_pair_that_is_replaced_while_it_is_read_is_loaded(files: Files, authority: Authority, replaced: int) -> None:
    """Once: between the readings of the certificate and of the key. More often: the next reload finds the pair."""
    file = ChangingFile(files[0])
    certificate = ServerCertificate(file, files[1])
    former, new = files[0].read_bytes(), authority.issue("127.0.0.1")
    files[0].write_bytes(new.certificate)
    files[1].write_bytes(new.key)
    file.contents = [new.certificate, *[former, new.certificate] * replaced]
    assert certificate.reload()
    if replaced == 3:
        assert "change while they are read" in (certificate.fault or "")
        assert certificate.reload()
    assert certificate.fault is None
    assert not certificate.reload()


def test_one_without_the_other_is_refused(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_TLS_CERT", str(files[0]))
    with pytest.raises(Refusal, match="HALFNOTE_TLS_KEY is not set"):
        settings_with()
    monkeypatch.setenv("HALFNOTE_TLS_CERT", "")
    monkeypatch.setenv("HALFNOTE_TLS_KEY", str(files[1]))
    with pytest.raises(Refusal, match="HALFNOTE_TLS_CERT is not set"):
        settings_with()


def test_serve_refuses_before_it_begins(files: Files, tmp_path: Path) -> None:
    files[1].unlink()
    settings = Settings(data_dir=tmp_path / "data", port=free_port(), tls_cert=files[0], tls_key=files[1])
    with pytest.raises(Refusal, match=r"tls.key cannot be read"):
        serve(settings)
    assert not (tmp_path / "data").exists()
