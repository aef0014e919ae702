"""The embedded Postgres without the key file that sealed its secrets."""

import re
from pathlib import Path

import httpx
import pytest

from app.secrets.key_file import read_keys
from tests.lifecycle.test_serve import run
from tests.support.processes import Service, free_port


@pytest.mark.parametrize("named", [True, False], ids=["named", "default"])
async def test_a_missing_key_file_is_not_replaced_over_sealed_secrets(
    data_dir: Path, tmp_path: Path, named: bool
) -> None:
    path = tmp_path / "our.keys" if named else data_dir / "secrets.keys"
    env = {"HALFNOTE_SECRETS_KEY_FILE": str(path)} if named else {}
    service = Service(data_dir, "serve", **env)
    await service.start()
    try:
        group = {"check_urls": ["http://127.0.0.1:9/check"]}
        assert httpx.put(f"{service.url}/producer-groups/shop", json=group).status_code == 201
    finally:
        service.stop()
    kept = path.rename(tmp_path / "kept.keys")

    with pytest.raises(RuntimeError, match=f"The key file {path} is missing, and it sealed 1 secrets") as refused:
        await service.start()
    assert "Traceback" not in str(refused.value)
    assert not path.exists()

    kept.rename(path)
    await service.start()
    try:
        assert httpx.post(f"{service.url}/producer-groups/shop/rotate-secret").status_code == 200
    finally:
        service.stop()


async def test_a_missing_key_file_is_made_while_nothing_is_sealed(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "our.keys"
    service = Service(data_dir, "serve", HALFNOTE_SECRETS_KEY_FILE=str(path))
    for _ in range(2):
        await service.start()
        service.stop()
        assert len(read_keys(path).by_id) == 1
        path.unlink()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("none/our.keys", "cannot be made: No such file or directory. Make its directory"),
        ("our.keys", "line 1 of the key file .*our.keys is not a key"),
    ],
    ids=["missing directory", "bad line"],
)
@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_an_unusable_key_file_is_named(data_dir: Path, tmp_path: Path, command: str, file: str, said: str) -> None:
    (tmp_path / "our.keys").write_text("no key\n")
    env = {"HALFNOTE_SECRETS_KEY_FILE": str(tmp_path / file), "HALFNOTE_DATA_DIR": str(data_dir)}
    port = () if command == "migrate" else ("--port", str(free_port()))
    ended = run(command, *port, HALFNOTE_WORKERS="1", **env)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert re.search(rf"^halfnote: HALFNOTE_SECRETS_KEY_FILE: .*{said}", ended.stderr, re.MULTILINE)
