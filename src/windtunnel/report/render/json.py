"""Results as JSON documents: SI numbers, units in the names, independent of machine and time."""

from operator import methodcaller
from typing import Any

import msgspec


def as_text(document: Any) -> str:
    """Return a document as indented JSON; numbers of numpy are plain ones."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=methodcaller("item")), indent=2).decode()
