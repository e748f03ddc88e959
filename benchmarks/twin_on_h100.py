"""The twin beside a real vLLM: the same client sends the same loads, in the same order, to both.

    python benchmarks/twin_on_h100.py [LOAD ...]

The real one is the healthy server of benchmarks/measured/h100: vLLM 0.24.0 with Llama-3.1-8B on one H100. The twin has
its command line and nothing else of it, and finds in its prefix cache what the loads before have left there, as the
real one did. Takes as long as the loads: three minutes. Latencies are the client's, which here shares two cores with
the twin and had sixteen with the server.
"""

import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import measure_vllm
from windtunnel.lab.bench.client import Endpoint

MEASURED = Path(__file__).parent / "measured" / "h100" / "loads" / "healthy"
LOADS = (
    *("first-chat", "chat", "open", "prefix", "chat-again", "open-again", "prefix-again"),
    *("long-prompts", "sampled", "many", "few"),
)
FIRST_USE = ("first-chat", "sampled")
"""Loads in which vLLM compiled kernels at their first use."""
PORT, MODEL, VOCABULARY = 8123, "meta-llama/Llama-3.1-8B", 128256
SERVER = f"""
model: {MODEL}
deployment:
  device: h100_sxm
  engine: {{name: vllm, version: 0.24.0, max_model_len: 20480}}
workload: {{arrivals: {{type: burst}}, input_tokens: 1, output_tokens: 1, num_requests: 1}}
"""
FIGURES = ("TTFT mean", "TPOT mean", "end to end mean", "TTFT p50", "TPOT p50", "TPOT p99")


def main() -> None:
    measure_vllm.read_plan("measure_vllm.yaml")
    loads = tuple(sys.argv[1:]) or LOADS
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "server.yaml").write_text(SERVER)
        command = [sys.executable, "-m", "windtunnel", "serve", "server.yaml", "--port", str(PORT)]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as twin:
            try:
                wait_for(f"http://127.0.0.1:{PORT}/health")
                endpoint = Endpoint(f"http://127.0.0.1:{PORT}/v1", vocabulary=VOCABULARY)
                measure_vllm.warm(endpoint, MODEL)
                for load in loads:
                    measure_vllm.send(Path(folder) / load, endpoint, MODEL, load)
            finally:
                twin.terminate()
        print_table(loads, {load: figures(Path(folder) / load) for load in loads})


def wait_for(url: str) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(1)
        else:
            return
    sys.exit(f"{url} does not answer")


def figures(folder: Path) -> list[float]:
    """Return `FIGURES` of a run, in seconds."""
    table = pq.read_table(folder / "requests.parquet").to_pydict()
    counts = ~np.array(table["is_warmup"])
    ttft, tpot, e2e = (np.array(table[name], float)[counts] for name in ("ttft_s", "tpot_s", "e2e_s"))
    means = [float(np.nanmean(values)) for values in (ttft, tpot, e2e)]
    return [*means, float(np.nanmedian(ttft)), float(np.nanmedian(tpot)), float(np.nanpercentile(tpot, 99))]


def print_table(loads: tuple[str, ...], of_twin: dict[str, list[float]]) -> None:
    print(f"\n| load | {' | '.join(FIGURES)} |\n|---|{'---|' * len(FIGURES)}")
    errors = []
    for load in loads:
        pairs = list(zip(figures(MEASURED / load), of_twin[load], strict=True))
        cells = [f"{real * 1e3:.1f} ms, {twin / real - 1:+.0%}" for real, twin in pairs]
        if load not in FIRST_USE:
            errors.append([abs(twin / real - 1) for real, twin in pairs])
        print(f"| {load}{' (first use)' if load in FIRST_USE else ''} | {' | '.join(cells)} |")
    medians = [f"{value:.1%}" for value in np.median(errors, axis=0)]
    print(f"| median of {len(errors)}, without first uses | {' | '.join(medians)} |")
    if {"chat", "chat-again"} <= set(loads):
        pairs = list(zip(figures(MEASURED / "chat"), figures(MEASURED / "chat-again"), strict=True))
        print(f"| real: chat again over chat | {' | '.join(f'{again / once - 1:+.0%}' for once, again in pairs)} |")


if __name__ == "__main__":
    main()
