"""Release numbers of engines and frameworks, as keys that sort."""

import re

from windtunnel.errors import InputError


def version_key(version: str) -> tuple[int, ...]:
    """Return a version as six numbers that compare: `0.19.0` < `0.24`, `1.3.0rc5` < `1.3.0`, a nightly build newest.

    Raises:
        InputError: it is neither a number nor a nightly build.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:(rc|a|b|\.?dev|\.?post)(\d+))?", version)
    if match is None:
        if is_unreleased(version):
            return (10**6, 0, 0, 0, 0, 0)
        raise InputError(f"{version!r} is not a version", "write it as the engine does: 0.19.0, 1.3.0rc5, nightly")
    numbers = [int(part) for part in match[1].split(".")]
    stage = {"a": -3, "b": -2, "rc": -1, None: 0}.get(match[2], 1 if match[2] and "post" in match[2] else -4)
    return (*(numbers + [0] * 4)[:4], stage, int(match[3] or 0))


def is_unreleased(version: str) -> bool:
    """Whether a version is a build between releases, such as `nightly-5b8c30d` and `main`."""
    return re.match(r"nightly|main|latest|dev", version) is not None
