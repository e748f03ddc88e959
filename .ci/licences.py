"""List the licences of everything that windtunnel needs, and write its bill of materials and CI's lock.

    python .ci/licences.py                     a line for each package: name, version, licence
    python .ci/licences.py --lock FILE         the versions that are installed, as constraints for pip
    python .ci/licences.py --sbom FILE         a CycloneDX bill of materials (needs cyclonedx-bom: make sbom)

Only packages that windtunnel's dependencies, extras and development groups lead to count, whatever else is installed.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(project: dict, runtime_only: bool) -> list[str]:
    """Return the requirements of the project: dependencies, extras and groups; or those of every installation."""
    needed = list(project["project"]["dependencies"])
    if runtime_only:
        return needed
    groups = [*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()]
    return needed + [text for group in groups for text in group if isinstance(text, str)]


def closure(texts: list[str]) -> dict[str, metadata.Distribution]:
    """Return the installed packages that requirements lead to, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(Requirement(text), "") for text in texts]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found[name] = distribution
        for text in distribution.requires or ():
            waiting += [(Requirement(text), each) for each in ("", *requirement.extras)]
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence of a package: its SPDX expression, its classifiers, or the first line of its field or file."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return expression
    classifiers = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if text.startswith("License")]
    named = [text for text in classifiers if text != "OSI Approved"]
    files = [file for file in distribution.files or () if file.name.startswith("LICENSE")]
    text = about.get("License") or (files[0].read_text(encoding="utf-8") if files else "unknown")
    return "; ".join(named) or text.strip().splitlines()[0]


def lock(packages: dict[str, metadata.Distribution]) -> Iterator[str]:
    """Yield the lines of a file of constraints; a build's own suffix (+cpu) is left out."""
    yield f"# Versions that CI installs, for Python {sys.version_info[0]}.{sys.version_info[1]}: make lock"
    for name, distribution in packages.items():
        yield f"{name}=={re.sub(r'[+].*', '', distribution.version)}"


def main() -> None:
    """List, or write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", action="store_true", help="only what every installation has")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--sbom", type=Path)
    options = parser.parse_args()
    packages = closure(requirements(tomllib.loads(PROJECT.read_text(encoding="utf-8")), options.runtime))
    if options.lock:
        options.lock.write_text("\n".join(lock(packages)) + "\n", encoding="utf-8")
    if options.sbom:
        command = ["cyclonedx_py", "environment", sys.executable, "--pyproject", str(PROJECT), "-o", str(options.sbom)]
        subprocess.run([sys.executable, "-m", *command], check=True)
    if not (options.lock or options.sbom):
        for name, distribution in packages.items():
            print(f"{name:32}{distribution.version:20}{licence(distribution)}")  # noqa: T201


if __name__ == "__main__":
    main()
