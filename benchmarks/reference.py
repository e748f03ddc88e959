"""Where recorded runs and measurements of other systems lie, which are not part of the repository."""

import os
from pathlib import Path

REFERENCE = Path(os.environ.get("WINDTUNNEL_REFERENCE") or Path(__file__).resolve().parents[2] / "shared" / "reference")
