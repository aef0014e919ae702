"""Files and directories of any filesystem that Spark supports: local paths, s3a://…, hdfs://…"""

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from spark.errors import RunFailedError

# Java's errors for a filesystem without a jar: one whose class name is known, and one that is not known at all.
UNKNOWN = ("ClassNotFoundException", "UnsupportedFileSystemException")


class Files:
    """The file operations that a run needs in addition to those of Spark.

    Failures are Py4JJavaError, or RunFailedError if Spark lacks the jars of a filesystem.
    """

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark._jvm
        assert jvm is not None
        self._jvm: Any = jvm
        self._configuration: Any = spark._jsc.hadoopConfiguration()

    def exists(self, place: str) -> bool:
        """Return whether the path exists."""
        system, path = self._at(place)
        return bool(system.exists(path))

    def is_directory(self, place: str) -> bool:
        """Return whether the path is a directory."""
        system, path = self._at(place)
        return bool(system.getFileStatus(path).isDirectory())

    def children(self, directory: str) -> list[str]:
        """Return the entries of a directory."""
        system, path = self._at(directory)
        return [status.getPath().toString() for status in system.listStatus(path)] if system.exists(path) else []

    def local_files(self, directory: str) -> list[str] | None:
        """Return the paths of a directory's data files if they are on this machine, else None.

        Spark reads no files whose names begin with `_` or `.`.
        """
        places = self.children(directory)
        if not all(place.startswith("file:/") for place in places):
            return None
        paths = [place.removeprefix("file:") for place in places]
        return sorted(path for path in paths if not path.rpartition("/")[2].startswith(("_", ".")))

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
        """Remove a file, or a directory with its content, if it exists."""
        system, path = self._at(place)
        system.delete(path, True)

    def replace(self, place: str, by: str) -> None:
        """Put one file or directory in the place of another, which may be missing."""
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
                f"Spark lacks the jars that {place} needs. For s3a:// it is org.apache.hadoop:hadoop-aws:{hadoop}, "
                'with what that brings: docs/archive.md, "In a bucket".'
            ) from error
        # Hadoop would write a checksum file beside each local file.
        system.setWriteChecksum(False)
        return system, path
