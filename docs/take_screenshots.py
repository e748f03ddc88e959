"""Take the screenshots that docs/guides/pages.md and docs/guides/dashboard.md show, in headless Chromium.

    python docs/take_screenshots.py

It needs the `test` dependency group and Chromium. Runs are simulated anew: the pictures show what this version does.
"""

import contextlib
import io
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from windtunnel import cli
from windtunnel.dashboard.server import DashboardServer
from windtunnel.dashboard.view import dashboard_of

FOLDER = Path(__file__).parent / "guides"
SIZES = {1440: 900, 390: 844}
"""Width of a window -> its height."""
EVERY = [(width, scheme) for width in SIZES for scheme in ("light", "dark")]
TWO = [(1440, "light"), (390, "dark")]

RUN = ("simulate", "--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm", "--input-tokens", "1024",
       "--output-tokens", "256", "--num-requests", "500", "--slo", "ttft=500ms,tpot=30ms")  # fmt: skip
JOB = ("train", "--model", "meta-llama/Llama-3.1-8B", "--device", "h100_sxm", "--num-devices", "8", "--pp", "4", "--tp",
       "2", "--sequence-tokens", "4096", "--global-batch", "32", "--total-tokens", "1e12")  # fmt: skip
SPACE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 1.0},
        "input_tokens": 512,
        "output_tokens": 64,
        "num_requests": 300,
    },
    "vary": {"device": ["h100_sxm", "l40s", "a100_sxm"], "tp": [1, 2, 4], "max_num_seqs": [16, 64, 256]},
    "limits": {"ttft_p90": "1s", "tpot_p99": "50ms"},
    "finalist_seeds": 3,
}


def write_results(runs: Path) -> None:
    """Write the results that the pages show below `runs`, and the pages of single results beside it."""
    space = runs / "space.yaml"
    space.write_text(json.dumps(SPACE), encoding="utf-8")
    pages = runs.parent
    for command in (
        (*RUN, "--rate", "8", "--out", str(runs / "rate8"), "--html", str(pages / "run.html")),
        (*RUN, "--rate", "45", "--out", str(runs / "rate45"), "--html", str(pages / "overload.html")),
        ("search", str(space), "--no-store", "--out", str(runs / "found"), "--html", str(pages / "search.html")),
        (*JOB, "--html", str(pages / "training.html")),
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.run(command) == 0, command


@contextlib.contextmanager
def served(runs: Path) -> Iterator[str]:
    """Serve the dashboard of `runs` at the address that this gives."""
    with DashboardServer(dashboard_of(runs)) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        yield server.url.rstrip("/")
        server.stop()
        thread.join()


def take(browser: Browser, address: str, name: str, sizes: list[tuple[int, str]], ready: str = "main") -> None:
    """Write the upper part of a page as `pages/NAME-WIDTH-SCHEME.png` for every width and colour scheme."""
    for width, scheme in sizes:
        size = {"width": width, "height": SIZES[width]}
        page = browser.new_page(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
        page.goto(address)
        page.wait_for_selector(ready)
        page.wait_for_timeout(300)
        page.screenshot(path=FOLDER / "pages" / f"{name}-{width}-{scheme}.png")
        page.close()


def main() -> None:
    """Write all screenshots."""
    with tempfile.TemporaryDirectory() as draft, sync_playwright() as playwright:
        runs = Path(draft) / "runs"
        runs.mkdir()
        write_results(runs)
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, sizes in {"run": EVERY, "overload": TWO, "search": EVERY, "training": TWO}.items():
            take(browser, (runs.parent / f"{name}.html").as_uri(), name, sizes)
        with served(runs) as address:
            take(browser, f"{address}/compare?run=rate8&run=rate45", "compare", TWO)
            take(browser, f"{address}/try", "try", TWO, "#result canvas")
            take(browser, f"{address}/", "runs", TWO)
            take(browser, f"{address}/run/rate8", "dashboard", TWO[:1])
        (FOLDER / "pages" / "dashboard-1440-light.png").replace(FOLDER / "dashboard.png")


if __name__ == "__main__":
    main()
