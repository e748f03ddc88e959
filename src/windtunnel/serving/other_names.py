"""What other tools call the options of this one; imported by every `--help`."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from windtunnel.schema import read_yaml


@cache
def other_names() -> Mapping[str, str]:
    """Return the name of an option in another tool -> what it is called here."""
    names: Mapping[str, str] = read_yaml(Path(__file__).with_name("other_names.yaml"))
    return names
