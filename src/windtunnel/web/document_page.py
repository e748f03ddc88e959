"""Documents of verbs other than simulate and bench, as pages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windtunnel.report.documents import as_text
from windtunnel.report.html import Section
from windtunnel.web.results import Found


def document_sections(path: Path, found: Found, document: Mapping[str, Any]) -> list[Section]:
    """What a document says."""
    from html import escape

    return [Section("Document", f"<pre>{escape(as_text(document))}</pre>")]
