"""What lies in the folder of recorded reference data, for tests that run once for each of it."""

from reference import REFERENCE


def entries(pattern: str) -> list[str]:
    """Names of the folders (of `*/FILE`) or files that `pattern` finds there; none where the folder is absent."""
    found = sorted(REFERENCE.glob(pattern))
    return [path.parent.name if "*/" in pattern else path.name for path in found]
