"""A bucket of a real S3 server, MinIO, as a process of its own; and Spark's jars for it, by their coordinate."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pyspark
from pyarrow.fs import FileSelector, FileType, S3FileSystem

from tests.support.brokers import free_ports
from tests.support.requirements import absent

# Of the version of Spark's own Hadoop: others have classes that do not fit together.
[HADOOP] = [
    jar.stem.removeprefix("hadoop-client-api-")
    for jar in (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
]
JARS = f"org.apache.hadoop:hadoop-aws:{HADOOP}"
FETCHED = Path.home() / ".m2/repository/org/apache/hadoop/hadoop-aws" / HADOOP / f"hadoop-aws-{HADOOP}.jar"
SERVERS = Path.home() / ".cache" / "halfnote" / "s3"
NAME, USER, PASSWORD = "archive", "halfnote", "order-1030"
START_WITHIN_S = 90.0


@dataclass(frozen=True)
class Bucket:
    """An empty bucket; `url` is what Spark calls it, `environment` what a program needs to reach it."""

    endpoint: str

    @property
    def url(self) -> str:
        return f"s3a://{NAME}"

    @property
    def environment(self) -> dict[str, str]:
        settings = (f"spark.jars.packages={JARS}", "spark.hadoop.fs.s3a.path.style.access=true")
        return {
            "HALFNOTE_SPARK_CONF": "\n".join(settings),
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": PASSWORD,
            "AWS_REGION": "us-east-1",
        }

    @property
    def files(self) -> S3FileSystem:
        """Another client of S3 than Spark's; its paths begin with the bucket's name."""
        return S3FileSystem(
            access_key=USER,
            secret_key=PASSWORD,
            endpoint_override=self.endpoint,
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def objects(self, below: str = "") -> list[str]:
        """The objects below a prefix, by their paths in the bucket."""
        found = self.files.get_file_info(FileSelector(f"{NAME}/{below}", recursive=True, allow_not_found=True))
        return sorted(one.path.removeprefix(f"{NAME}/") for one in found if one.type == FileType.File)

    def read(self, key: str) -> bytes:
        """An object's bytes."""
        with self.files.open_input_stream(f"{NAME}/{key}") as stream:
            content: bytes = stream.read()
        return content

    def write(self, key: str, content: bytes) -> None:
        """Put another object in an object's place."""
        with self.files.open_output_stream(f"{NAME}/{key}") as stream:
            stream.write(content)


@contextmanager
def bucket(directory: Path) -> Iterator[Bucket]:
    """Lend an empty bucket, whose server keeps it below a directory; skip the test without server or jars."""
    server = shutil.which("minio", path=f"{SERVERS}{os.pathsep}{os.environ.get('PATH', '')}")
    if server is None:
        absent("MinIO is not installed here: make bucket-deps", "BUCKET")
    if not FETCHED.is_file():
        absent(f"{JARS} was not fetched here: make bucket-deps", "BUCKET")
    port, console = free_ports(2)
    endpoint = f"http://127.0.0.1:{port}"
    own = {"MINIO_ROOT_USER": USER, "MINIO_ROOT_PASSWORD": PASSWORD, "MINIO_BROWSER": "off", "MINIO_UPDATE": "off"}
    at = ["--address", f"127.0.0.1:{port}", "--console-address", f"127.0.0.1:{console}"]
    directory.mkdir()
    with (directory.parent / "minio.log").open("wb") as log:
        process = subprocess.Popen(
            [str(server), "server", *at, str(directory)],
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(directory.parent), **own},
            stdout=log,
            stderr=log,
        )
    try:
        _is_ready(process, endpoint, directory.parent / "minio.log")
        made = Bucket(endpoint)
        made.files.create_dir(NAME)
        yield made
    finally:
        process.kill()
        process.wait()


def _is_ready(process: "subprocess.Popen[bytes]", endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{endpoint}/minio/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"MinIO did not start: {log.read_text()}")
