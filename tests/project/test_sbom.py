"""`make sbom`: CycloneDX, with the components that the sources name."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.sbom_of_image import components
from tests.support.processes import ROOT

# By the library that the tool itself is made of: as the schema has it, and as a reader takes it.
PARSED = """
import json, sys
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = open(sys.argv[1]).read()
fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
assert fault is None, fault
print(len(Bom.from_json(json.loads(text)).components))
"""


def test_what_the_dockerfile_installs_is_named() -> None:
    urls = {lock: {one.get("purl") for one in components(lock)} for lock in ("image", "spark")}
    python = {f"pkg:deb/debian/{name}?distro=debian-12" for name in ("ca-certificates", "python3")}
    java = {f"pkg:deb/debian/{name}?distro=debian-12" for name in ("openjdk-17-jre-headless", "procps")}
    assert urls["image"] == {None, *python}
    assert urls["spark"] == {None, *python, *java, "pkg:maven/org.postgresql/postgresql@42.7.7"}


@pytest.mark.slow
def test_it_is_cyclonedx_and_has_every_package_of_the_lock(tmp_path: Path) -> None:
    tools = ROOT / ".tools" / "sbom"
    made = subprocess.run(
        ["scripts/sbom", str(tools), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert made.returncode == 0, made.stderr
    for lock in ("image", "spark"):
        file = tmp_path / f"sbom-{lock}.json"
        found: dict[str, Any] = json.loads(file.read_text())
        assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
        names = {(one["name"].lower(), one.get("version")) for one in found["components"]}
        locked = re.findall(r"^([\w.-]+)(?:\[.*?\])?==([\w.]+)", (ROOT / f"requirements-{lock}.lock").read_text(), re.M)
        assert len(locked) > 10
        assert {(name.lower(), version) for name, version in locked} <= names
        references = [one["bom-ref"] for one in found["components"]]
        assert len(references) == len(set(references))
        read = subprocess.run(
            [str(tools / "bin" / "python"), "-c", PARSED, str(file)], capture_output=True, text=True, timeout=120
        )
        assert read.returncode == 0, read.stderr
        assert int(read.stdout) == len(found["components"])
