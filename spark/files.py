"""Files and directories of any filesystem that Spark knows: a path of this machine, s3a://…, hdfs://…"""

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from spark.errors import RunFailedError

# What Java says of a filesystem that no jar has: one whose class is known by name, and one that nobody knows.
UNKNOWN = ("ClassNotFoundException", "UnsupportedFileSystemException")


class Files:
    """The few acts that a run needs beside Spark's reading and writing. Failures are Py4JJavaError, and RunFailedError
    if Spark has not the jars of a place's filesystem."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark._jvm
        assert jvm is not None
        self._jvm: Any = jvm
        self._configuration: Any = spark._jsc.hadoopConfiguration()

    def exists(self, place: str) -> bool:
        """Tell whether there is anything."""
        system, path = self._at(place)
        return bool(system.exists(path))

    def children(self, directory: str) -> list[str]:
        """Return what is in a directory."""
        system, path = self._at(directory)
        return [status.getPath().toString() for status in system.listStatus(path)] if system.exists(path) else []

    def read_text(self, place: str) -> str:
        """Return a small file's text."""
        system, path = self._at(place)
        stream = system.open(path)
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write_text(self, place: str, text: str) -> None:
        """Write a small file."""
        system, path = self._at(place)
        stream = system.create(path, True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def make(self, directory: str) -> None:
        """Make a directory and its parents."""
        system, path = self._at(directory)
        system.mkdirs(path)

    def remove(self, place: str) -> None:
        """Remove a file or a directory with all that is in it, if it is there."""
        system, path = self._at(place)
        system.delete(path, True)

    def replace(self, place: str, by: str) -> None:
        """Put one file or directory in the place of another, which need not be there."""
        system, path = self._at(place)
        system.delete(path, True)
        if not system.rename(self._jvm.org.apache.hadoop.fs.Path(by), path):
            raise OSError(f"{by} could not be renamed to {place}")

    def _at(self, place: str) -> tuple[Any, Any]:
        path = self._jvm.org.apache.hadoop.fs.Path(place)
        try:
            system = path.getFileSystem(self._configuration)
        except Py4JJavaError as error:
            if not any(name in str(error.java_exception.toString()) for name in UNKNOWN):
                raise
            hadoop = self._jvm.org.apache.hadoop.util.VersionInfo.getVersion()
            raise RunFailedError(
                f"Spark has not the jars that {place} needs. For s3a:// it is org.apache.hadoop:hadoop-aws:{hadoop}, "
                'with what that brings: docs/archive.md, "In a bucket".'
            ) from error
        # Of a local file Hadoop would keep a checksum in a file beside it.
        system.setWriteChecksum(False)
        return system, path
