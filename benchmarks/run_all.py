"""Run every benchmark in this folder, or those named, and print their tables.

python benchmarks/run_all.py              all
python benchmarks/run_all.py speed        benchmarks/speed.py
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks(names: list[str]) -> list[Path]:
    known = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__).resolve()}
    if unknown := set(names) - known.keys():
        sys.exit(f"error: no benchmark {', '.join(sorted(unknown))}\nhint: there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def main() -> int:
    failed = []
    for path in benchmarks(sys.argv[1:]):
        print(f"\n## {path.stem}\n", flush=True)
        if subprocess.run([sys.executable, path], check=False).returncode:
            failed.append(path.stem)
    if failed:
        print(f"\nerror: failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
