"""The package is ready to publish: metadata, links of its page, the image, and the files that GitHub reads."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
GITHUB = REPOSITORY / ".github"
SCHEMAS = {
    ".github/workflows/*.yml": "vendor.github-workflows",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    ".github/dependabot.yml": "vendor.dependabot",
    "CITATION.cff": "vendor.citation-file-format",
}
"""Files -> their schema in check-jsonschema."""

needs_checkout = pytest.mark.skipif(not GITHUB.is_dir(), reason="a source distribution has none of these files")


def test_links_of_the_page_on_pypi_are_absolute() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for change in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "<!--" not in text
    paths = {target.partition("/blob/main/")[2].partition("#")[0] for target in targets if "example.org" in target}
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]


@pytest.mark.full
@needs_checkout
@pytest.mark.parametrize("pattern", SCHEMAS)
def test_files_follow_their_schemas(pattern: str) -> None:
    command = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    files = sorted(map(str, REPOSITORY.glob(pattern)))
    assert files
    if command is None:
        pytest.skip("check-jsonschema is not installed: make venv")
    done = subprocess.run(
        [command, "--builtin-schema", SCHEMAS[pattern], *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_checkout
def test_workflows_call_what_the_makefile_has_and_may_do_little() -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in (GITHUB / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for job in workflow["jobs"].values():
            commands = "\n".join(step.get("run", "") for step in job["steps"])
            assert set(re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)) <= targets
            assert "timeout-minutes" in job


@needs_checkout
def test_every_python_version_is_tested() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    listed = [text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == listed


@needs_checkout
def test_the_release_replaces_every_placeholder() -> None:
    """The release workflow writes the repository's address in place of the one in pyproject.toml."""
    placeholder = PROJECT["project"]["urls"]["Source"]
    assert all(url.startswith(placeholder) for url in PROJECT["project"]["urls"].values())
    assert f"s#{placeholder}#" in (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")


@needs_checkout
def test_the_image_runs_the_command_as_a_user_without_rights() -> None:
    text = re.sub(r"\\\n", " ", (REPOSITORY / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    last = [line.split(maxsplit=1)[0] for line in lines]
    assert 'ENTRYPOINT ["windtunnel"]' in lines
    user, warm = last.index("USER"), len(last) - 1 - last[::-1].index("RUN")
    assert lines[user] == "USER windtunnel"
    assert user < warm
    assert "windtunnel warm" in lines[warm]
    copied = {name for line in lines if re.match(r"COPY (?!--from)", line) for name in line.split()[1:-1]}
    kept = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied == {line[1:] for line in kept if line.startswith("!")}


@needs_checkout
def test_hooks_before_commits_call_tools_of_the_developers_environment() -> None:
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    lint = " ".join(PROJECT["dependency-groups"]["lint"]).replace("import-linter", "lint-imports")
    for hook in (hook for repository in config["repos"] for hook in repository["hooks"]):
        assert hook["entry"].split()[0].removeprefix(".venv/bin/") in lint
