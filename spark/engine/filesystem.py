"""Files and directories of any filesystem that Spark supports: local paths, s3a://…, hdfs://…"""

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JError, Py4JJavaError
from pyarrow import fs
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, is_remote

from spark.errors import RunFailedError

# Java's errors for a filesystem without a jar: one whose class name is known, and one that is not known at all.
UNKNOWN = ("ClassNotFoundException", "UnsupportedFileSystemException")
# The exceptions of Spark, and of the files here.
FAILURES = (PySparkException, Py4JError, OSError)
_CHUNK = 1 << 20


class Files(ABC):
    """The file operations that a run needs in addition to those of Spark.

    Failures are FAILURES, or RunFailedError if a filesystem is not supported.
    """

    @abstractmethod
    def exists(self, place: str) -> bool:
        """Return whether the path exists."""

    @abstractmethod
    def is_directory(self, place: str) -> bool:
        """Return whether the path, which exists, is a directory."""

    @abstractmethod
    def children(self, directory: str) -> list[str]:
        """Return the entries of a directory; of a file, the file itself; none if the path does not exist."""

    @abstractmethod
    def qualified(self, place: str) -> str:
        """Return the full URL of a place, such as `file:/archive`, which means the same on every machine."""

    @abstractmethod
    def size(self, place: str) -> int:
        """Return a file's length in bytes."""

    @abstractmethod
    def length(self, place: str) -> int | None:
        """Return a file's length in bytes, or None if it does not exist; one request to the filesystem."""

    @abstractmethod
    def sha256(self, place: str) -> str:
        """Return the SHA-256 of a file's bytes, as hex; reads it in pieces."""

    @abstractmethod
    def read_text(self, place: str) -> str:
        """Return a small file's text."""

    @abstractmethod
    def write_text(self, place: str, text: str) -> None:
        """Write a small file, and make its directory."""

    @abstractmethod
    def make(self, directory: str) -> None:
        """Make a directory and its parents."""

    @abstractmethod
    def remove(self, place: str) -> None:
        """Remove a file, or a directory with its content, if it exists. Raises OSError if something is left of it."""

    @abstractmethod
    def replace(self, place: str, by: str) -> None:
        """Put one file or directory in the place of another, which may be missing."""

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted; none if the directory does not exist."""
        return sorted(name_of(child) for child in self.children(directory))

    def local_files(self, directory: str) -> list[str] | None:
        """Return the paths of a directory's data files if they are on this machine, else None.

        Spark reads no files whose names begin with `_` or `.`.
        """
        places = self.children(directory)
        if not all(place.startswith("file:/") for place in places):
            return None
        paths = [place.removeprefix("file:") for place in places]
        return sorted(path for path in paths if not name_of(path).startswith(("_", ".")))


def files_for(spark: SparkSession) -> Files:
    """Return the files as Spark has them, or, if Spark runs behind a Connect server, as this process has them."""
    return FilesHere() if is_remote() else FilesOfSpark(spark)


def normal(place: str) -> str:
    """Return a URL as Hadoop writes it: `file:/archive` for `file:///archive`; without a slash at the end."""
    if place.startswith("file:"):
        place = "file:/" + place.removeprefix("file:").lstrip("/")
    return place.rstrip("/")


def is_below(place: str, root: str) -> bool:
    """Return whether a URL is below another one."""
    return normal(place).startswith(f"{normal(root)}/")


def name_of(place: str) -> str:
    """Return the last part of a path or URL."""
    return place.rstrip("/").rpartition("/")[2]


class FilesOfSpark(Files):
    """Files by the Hadoop libraries of this process's Spark, with its settings. Classic sessions only."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark._jvm
        assert jvm is not None
        self._jvm: Any = jvm
        # Java searches all jars for each part of a name that is no class, at each use.
        self._path: Any = jvm.org.apache.hadoop.fs.Path
        self._configuration: Any = spark._jsc.hadoopConfiguration()

    def exists(self, place: str) -> bool:
        system, path = self._at(place)
        return bool(system.exists(path))

    def is_directory(self, place: str) -> bool:
        system, path = self._at(place)
        return bool(system.getFileStatus(path).isDirectory())

    def children(self, directory: str) -> list[str]:
        system, path = self._at(directory)
        return [status.getPath().toString() for status in system.listStatus(path)] if system.exists(path) else []

    def qualified(self, place: str) -> str:
        system, path = self._at(place)
        return str(system.makeQualified(path).toString()).rstrip("/")

    def size(self, place: str) -> int:
        system, path = self._at(place)
        return int(system.getFileStatus(path).getLen())

    def length(self, place: str) -> int | None:
        try:
            return self.size(place)
        except Py4JJavaError as error:
            if not str(error.java_exception.toString()).startswith("java.io.FileNotFoundException"):
                raise
            return None

    def sha256(self, place: str) -> str:
        system, path = self._at(place)
        stream = system.open(path)
        try:
            return str(self._jvm.org.apache.commons.codec.digest.DigestUtils.sha256Hex(stream))
        finally:
            stream.close()

    def read_text(self, place: str) -> str:
        system, path = self._at(place)
        stream = system.open(path)
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write_text(self, place: str, text: str) -> None:
        system, path = self._at(place)
        stream = system.create(path, True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def make(self, directory: str) -> None:
        system, path = self._at(directory)
        system.mkdirs(path)

    def remove(self, place: str) -> None:
        system, path = self._at(place)
        # Hadoop's local filesystem returns false, also if it could not remove the path, and throws nothing.
        if not system.delete(path, True) and system.exists(path):
            raise OSError(f"{place} could not be removed")

    def replace(self, place: str, by: str) -> None:
        self.remove(place)
        system, path = self._at(place)
        if not system.rename(self._path(by), path):
            raise OSError(f"{by} could not be renamed to {place}")

    def _at(self, place: str) -> tuple[Any, Any]:
        path = self._path(place)
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


class FilesHere(Files):
    """Files by pyarrow, in this process. A path must lead to the same files here and where Spark runs."""

    def exists(self, place: str) -> bool:
        return bool(self._found(place).type != fs.FileType.NotFound)

    def is_directory(self, place: str) -> bool:
        return bool(self._found(place).type == fs.FileType.Directory)

    def children(self, directory: str) -> list[str]:
        system, path = _here(directory)
        kind = self._found(directory).type
        if kind == fs.FileType.NotFound:
            return []
        if kind == fs.FileType.File:
            return [directory]
        return [f"{directory.rstrip('/')}/{one.base_name}" for one in system.get_file_info(fs.FileSelector(path))]

    def qualified(self, place: str) -> str:
        return normal(place if urlsplit(place).scheme else f"file:{Path(place).absolute()}")

    def size(self, place: str) -> int:
        return int(self._found(place).size)

    def length(self, place: str) -> int | None:
        found = self._found(place)
        return int(found.size) if found.type == fs.FileType.File else None

    def sha256(self, place: str) -> str:
        system, path = _here(place)
        total = hashlib.sha256()
        with system.open_input_stream(path) as stream:
            while piece := stream.read(_CHUNK):
                total.update(piece)
        return total.hexdigest()

    def read_text(self, place: str) -> str:
        system, path = _here(place)
        with system.open_input_stream(path) as stream:
            return bytes(stream.read()).decode()

    def write_text(self, place: str, text: str) -> None:
        system, path = _here(place)
        system.create_dir(path.rpartition("/")[0], recursive=True)
        with system.open_output_stream(path) as stream:
            stream.write(text.encode())

    def make(self, directory: str) -> None:
        system, path = _here(directory)
        system.create_dir(path, recursive=True)

    def remove(self, place: str) -> None:
        system, path = _here(place)
        kind = self._found(place).type
        if kind == fs.FileType.Directory:
            system.delete_dir(path)
        elif kind != fs.FileType.NotFound:
            system.delete_file(path)

    def replace(self, place: str, by: str) -> None:
        self.remove(place)
        system, path = _here(place)
        _, old = _here(by)
        if isinstance(system, fs.LocalFileSystem) or not self.is_directory(by):
            system.move(old, path)
            return
        # A bucket has no directories that could be renamed.
        fs.copy_files(old, path, source_filesystem=system, destination_filesystem=system)
        self.remove(by)

    def _found(self, place: str) -> fs.FileInfo:
        system, path = _here(place)
        return system.get_file_info(path)


def _here(place: str) -> tuple[fs.FileSystem, str]:
    """Return pyarrow's filesystem and path of a path or URL. Raises RunFailedError if pyarrow does not support it."""
    scheme = urlsplit(place).scheme
    if scheme in ("", "file"):
        local = place if not scheme else "/" + place.removeprefix("file:").lstrip("/")
        return fs.LocalFileSystem(), str(Path(local).absolute())
    try:
        system, path = fs.FileSystem.from_uri(place.replace("s3a://", "s3://", 1))
    except (ValueError, NotImplementedError) as error:
        raise RunFailedError(f"With Spark Connect, {place} cannot be reached from here: {error}") from error
    return system, str(path)
