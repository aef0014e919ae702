"""Add the Dockerfile's Debian packages (including Java) and jars to a CycloneDX file, which has Python's packages.

    sbom_of_image.py image|spark FILE

Debian's packages have no version, because it depends on the day of the build. Only a built image shows the packages'
dependencies and the jars within PySpark's wheel.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCKERFILE = Path(__file__).parent.parent / "Dockerfile"
# The stages of each image, by its lock file. Stages that only build leave no files in the image.
STAGES = {"image": ("python", "service"), "spark": ("python", "spark")}
DEBIAN = {"type": "operating-system", "bom-ref": "debian-12", "name": "debian", "version": "12"}


def components(lock: str) -> list[dict[str, Any]]:
    """Return an image's contents, except Python's packages, as CycloneDX components. `lock`: image or spark."""
    stages = dict(re.findall(r"^FROM \S+ AS (\w[\w-]*)\n(.*?)(?=^FROM |\Z)", _dockerfile(), re.MULTILINE | re.DOTALL))
    packages = sorted({name for stage in STAGES[lock] for name in _installed(stages[stage])})
    return [DEBIAN, *map(_debian, packages), *(map(_jar, _jars(stages["jars"])) if lock == "spark" else [])]


def _dockerfile() -> str:
    return DOCKERFILE.read_text().replace("\\\n", " ")


def _installed(stage: str) -> list[str]:
    return [
        name
        for names in re.findall(r"apt-get install --yes --no-install-recommends ([^&\n]*)", stage)
        for name in names.split()
    ]


def _jars(stage: str) -> list[str]:
    return [jar for jars in re.findall(r"^ARG (?:JDBC|JARS)=(.*)$", stage, re.MULTILINE) for jar in jars.split()]


def _debian(name: str) -> dict[str, Any]:
    url = f"pkg:deb/debian/{name}?distro=debian-12"
    return {"type": "library", "bom-ref": url, "name": name, "purl": url}


def _jar(coordinate: str) -> dict[str, Any]:
    group, name, version = coordinate.split(":")
    url = f"pkg:maven/{group}/{name}@{version}"
    return {"type": "library", "bom-ref": url, "group": group, "name": name, "version": version, "purl": url}


def main(lock: str, file: str) -> None:
    """Add the components to a CycloneDX file."""
    bom = json.loads(Path(file).read_text())
    bom["components"] = [*bom.get("components", []), *components(lock)]
    Path(file).write_text(json.dumps(bom, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
