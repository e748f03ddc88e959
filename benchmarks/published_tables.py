"""List the tables of published wheels: writes `src/windtunnel/catalog/published_tables.csv`.

    pip download --no-deps --only-binary :all: --dest DIR aiconfigurator==0.10.0   each wheel of published_tables.yaml
    python benchmarks/published_tables.py DIR

Rows are counted as published; foreign and repeated ones are left out when tables are fetched.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from windtunnel.pricing.aiconfigurator.inventory import UNFETCHED_FILE, installed_systems
from windtunnel.pricing.aiconfigurator.published import entries, published

COLUMNS = ("wheel", "device", "family", "engine", "version", "table", "num_rows")


def tables(folder: Path) -> Iterator[tuple[str | int, ...]]:
    """Yield the tables of every wheel in `folder` that are not in the installed package."""
    for name, wheel in published().wheels.items():
        with zipfile.ZipFile(next(folder.glob(f"{wheel.project}-{wheel.version}-*.whl"))) as archive:
            for entry, place in entries(wheel, archive.namelist(), installed_systems()):
                if place.suffix == ".parquet":
                    content = archive.read(entry)
                    is_text = entry.endswith(".txt")
                    rows = content.count(b"\n") - 1 if is_text else pq.read_metadata(io.BytesIO(content)).num_rows
                    _, device, family, engine, version, file = place.parts
                    yield name, device, family, engine, version, file.removesuffix(".parquet"), rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the wheels")
    with UNFETCHED_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(tables(parser.parse_args().folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
