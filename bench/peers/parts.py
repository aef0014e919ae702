"""The other systems' programs: built once from pinned versions, and kept under ~/.cache/halfnote."""

import asyncio
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "halfnote"
SOURCES = Path(__file__).parent
BUILD_S = 1_800.0

ROCKETMQ_VERSION = "5.5.0"
# SHA-256 of the jars that run the servers and the client. Maven compares the others with its repository's checksums.
ROCKETMQ_JARS = {
    "rocketmq-broker": "24d34170a1ce9a9d3c23c78ea1d2f494b3fae9404d5df13b830f2ba1fa5ae956",
    "rocketmq-client": "50a00394c13545f6cc03a6dae3708142d81ca11a34fb60583c3bcc507ca21962",
    "rocketmq-namesrv": "e014415b4b67ad8486995b373866d7c6688404f478937f23d4c6f12a4c27f195",
    "rocketmq-remoting": "1273e2c5cd49692ac954f36a40251c7c89cbb7c5093a66bfcfbce7ce597dfd95",
    "rocketmq-store": "950919f63150e0994f8a133424bff5370a5bd84899cef789f429b95cdf39dc82",
}

DTM_VERSION = "v1.19.0"
DTM_MODULE = "github.com/dtm-labs/dtm"
# Go's hash of the module. The module's own go.sum holds the hashes of what it needs.
DTM_SUM = "h1:TKRf21MkelOR6PPGLT9QzNs0ZJF/RLz+zZPkeOwzPPU="

# By program: what needs it, and how to install it.
INSTALL = {
    "java": "RocketMQ runs on Java: apt install openjdk-17-jdk-headless",
    "javac": "RocketMQ's driver needs a Java compiler: apt install openjdk-17-jdk-headless",
    "mvn": "RocketMQ's jars come by Maven: apt install maven",
    "go": "DTM is built with Go: apt install golang-go",
}
ROCKETMQ_PROGRAMS = ("java", "javac", "mvn")
DTM_PROGRAMS = ("go",)


class MissingPartError(Exception):
    """A peer cannot run on this machine; the text says why and what to do."""


def require(*programs: str) -> None:
    """Raise MissingPartError with the way to install the first program that is missing."""
    for program in programs:
        if shutil.which(program) is None:
            raise MissingPartError(f"`{program}` is missing. {INSTALL[program]}")


async def rocketmq() -> Path:
    """Return a directory with RocketMQ's jars in `lib` and the compiled driver in `classes`."""
    require(*ROCKETMQ_PROGRAMS)
    place = CACHE / f"rocketmq-{ROCKETMQ_VERSION}"
    if not (place / "lib").is_dir():
        with tempfile.TemporaryDirectory(dir=made(CACHE)) as building:
            lib = Path(building, "lib")
            pom = SOURCES / "java" / "pom.xml"
            # -C refuses a jar whose checksum differs.
            options = ["-q", "-B", "-C", "-f", str(pom), f"-DoutputDirectory={lib}"]
            await _run("mvn", *options, "dependency:copy-dependencies")
            _check_jars(lib)
            made(place)
            lib.rename(place / "lib")
    _check_jars(place / "lib")
    # The driver is part of this program, so it is compiled each time.
    classes = made(place / "classes")
    await _run("javac", "-nowarn", "-cp", f"{place}/lib/*", "-d", str(classes), str(SOURCES / "java" / "Driver.java"))
    return place


async def dtm() -> Path:
    """Return a directory with DTM's server `dtm`, its tables `tables.sql` and the driver `driver`."""
    require(*DTM_PROGRAMS)
    place = CACHE / f"dtm-{DTM_VERSION.removeprefix('v')}"
    source = place / "source"
    if not source.is_dir():
        answer = await _run("go", "mod", "download", "-json", f"{DTM_MODULE}@{DTM_VERSION}", cwd=CACHE)
        module = json.loads(answer)
        if module["Sum"] != DTM_SUM:
            raise MissingPartError(f"{DTM_MODULE} {DTM_VERSION} has the hash {module['Sum']}, expected {DTM_SUM}")
        with tempfile.TemporaryDirectory(dir=made(place)) as building:
            copied = Path(building, "source")
            # Go's module cache is read-only, and a plain copy would be read-only too.
            shutil.copytree(module["Dir"], copied, copy_function=shutil.copyfile)
            for directory in [copied, *(path for path in copied.rglob("*") if path.is_dir())]:
                directory.chmod(0o755)
            copied.rename(source)
    driver = made(source / "halfnotebench")
    shutil.copyfile(SOURCES / "go" / "main.go", driver / "main.go")
    # Both are in one module, so that its go.sum pins the packages of both. A build without changes takes a second.
    for target, package in (("dtm", "."), ("driver", "./halfnotebench")):
        await _run("go", "build", "-mod=readonly", "-o", str(place / target), package, cwd=source)
    shutil.copyfile(source / "sqls" / "dtmsvr.storage.postgres.sql", place / "tables.sql")
    return place


def made(directory: Path) -> Path:
    """Make a directory unless it exists, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _check_jars(lib: Path) -> None:
    for name, expected in ROCKETMQ_JARS.items():
        jar = lib / f"{name}-{ROCKETMQ_VERSION}.jar"
        if not jar.exists() or hashlib.sha256(jar.read_bytes()).hexdigest() != expected:
            raise MissingPartError(f"{jar} is missing or differs from the expected one. Delete {lib} and run again")


async def _run(*command: str, cwd: Path | None = None) -> str:
    """Run a program and return its output. Raises MissingPartError with the end of its messages if it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd and made(cwd), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(BUILD_S):
            output, messages = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise MissingPartError(f"{command[0]} did not end within {BUILD_S:g} s") from None
    if process.returncode:
        text = (output + messages).decode(errors="replace").strip()
        raise MissingPartError(f"{' '.join(command[:3])} failed: {text[-1500:]}")
    return output.decode()
