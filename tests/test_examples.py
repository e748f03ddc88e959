"""Every file in examples/ runs and prints what the `.out` file beside it says; `--update` writes those files anew.

`NN_title.py` is a script, `NN_title.yaml` a scenario for `windtunnel simulate`. In an `.out` file `...` stands for
anything.
"""

import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import transcript

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAME = re.compile(r"\d\d_[a-z0-9_]+\.(py|yaml)")


def examples() -> list[Path]:
    return sorted(path for path in EXAMPLES.iterdir() if NAME.fullmatch(path.name))


def output_of(example: Path, folder: Path) -> str:
    """What `example` prints, run in a copy of examples/ so that what it writes stays out of the repository."""
    copy = folder / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("*.py" if example.suffix == ".yaml" else ""))
    program = shlex.quote(sys.executable) if example.suffix == ".py" else "windtunnel simulate"
    command = f"{program} {example.name}"
    done = transcript.run(command, copy)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example_prints_what_it_says(example: Path, tmp_path: Path) -> None:
    expected = example.with_suffix(".out").read_text(encoding="utf-8")
    actual = output_of(example, tmp_path)
    assert transcript.matches(expected, actual), transcript.difference(expected, actual)


def test_examples_are_numbered_without_holes() -> None:
    assert [int(path.name[:2]) for path in examples()] == list(range(1, len(examples()) + 1))


def test_every_output_belongs_to_an_example() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.out")} == {example.stem for example in examples()}


def update() -> None:
    for example in examples():
        expected = example.with_suffix(".out")
        with tempfile.TemporaryDirectory() as folder:
            actual = output_of(example, Path(folder))
        if not expected.exists() or not transcript.matches(expected.read_text(encoding="utf-8"), actual):
            expected.write_text(actual, encoding="utf-8")
            sys.stderr.write(f"wrote {expected.relative_to(Path.cwd())}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python tests/test_examples.py --update")
    update()
