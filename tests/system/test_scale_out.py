"""The example of two installations in docs/operations/scale-out.md, with real services, commands and a receiver."""

import asyncio
import os
import re
import sys
from pathlib import Path

from tests.support.processes import ROOT, Service, free_port

PAGE = (ROOT / "docs" / "operations" / "scale-out.md").read_text()


def script() -> str:
    """Return the page's shell commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    return "".join(blocks)


async def test_two_installations_deliver_to_one_receiver(tmp_path: Path) -> None:
    [(secret, program)] = re.findall(r"^DEMO_SECRET=(\S+) python -m (demo\.receiver) --port 9031$", PAGE, re.MULTILINE)
    installations = [Service(tmp_path / name / "data", "serve") for name in ("orders", "payments")]
    for service in installations:
        service.log.parent.mkdir()
    await asyncio.gather(*(service.start() for service in installations))
    port = free_port()
    receiver = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", program, "--port", str(port)),
        cwd=ROOT,
        env=os.environ | {"DEMO_SECRET": secret},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        commands = script().replace("9031", str(port))
        for at, service in zip(("8080", "8081"), installations, strict=True):
            assert commands.count(f"http://127.0.0.1:{at}") == 2
            commands = commands.replace(f"http://127.0.0.1:{at}", service.url)
        shell = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", commands),
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await shell.communicate()
        assert shell.returncode == 0, printed.decode()
        assert receiver.stdout is not None
        async with asyncio.timeout(60):
            lines = [(await receiver.stdout.readline()).decode() for _ in installations]
    finally:
        receiver.terminate()
        await receiver.wait()
        for service in installations:
            service.stop()
    # As the page shows it.
    assert "".join(lines) in PAGE
