"""Serve models with random weights by vLLM on the GPU at hand, and record steps and requests under several loads.

    python benchmarks/measure_vllm.py --out measured/h100 --configs FOLDER --server llama-8b --server qwen3-30b

Every server of `measure_vllm.yaml` is started once and takes all of its loads, one after the other; what is measured is
kept, and the command goes on where it stopped. OUT then holds `runs.csv` (what was served, by which version, on what),
`steps.csv` (a row for each forward pass, by `windtunnel.lab.step_recorder`) and `loads/SERVER/LOAD`, the records of
`windtunnel bench`. FOLDER holds the models' config.json; without weights, every expert is about equally likely.
"""

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from windtunnel.cli.lab.bench import request_sampling
from windtunnel.errors import WindtunnelError
from windtunnel.lab.bench.client import Endpoint, bench
from windtunnel.lab.servers import started
from windtunnel.lab.step_recorder import VARIABLE
from windtunnel.lab.tiny_models import write_tokenizer
from windtunnel.metrics.client import client_summary
from windtunnel.report.lab.bench import bench_document, write_bench
from windtunnel.schema import read_yaml
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.workload.generate.requests import generate

PLAN: dict[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of all results.")
@click.option("--configs", required=True, type=click.Path(path_type=Path), help="Folder of MODEL/config.json.")
@click.option("--server", "servers", multiple=True, default=tuple(PLAN["servers"]), help="What to serve.  [all]")
@click.option("--loads", default=None, help="Names of loads, by commas.  [the server's]")
@click.option("--minutes", type=float, default=25.0, help="Begin no load after so many.  [25]")
def main(out: Path, configs: Path, servers: tuple[str, ...], loads: str | None, minutes: float) -> None:
    ends_s = time.monotonic() + 60 * minutes
    for name in servers:
        server = PLAN["servers"][name]
        wanted = loads.split(",") if loads else server["loads"]
        left = [load for load in wanted if not (out / "loads" / name / load / "summary.json").is_file()]
        if left and time.monotonic() < ends_s:
            try:
                serve(out, configs, name, left, ends_s)
            except WindtunnelError as error:
                click.echo(f"{name}: {error}", err=True)


def serve(out: Path, configs: Path, name: str, loads: list[str], ends_s: float) -> None:
    """Start a server and send it loads."""
    server = PLAN["servers"][name]
    config = json.loads((configs / server["config"]).read_text())
    os.environ[VARIABLE] = str((out / "steps" / f"{name}.csv").resolve())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        write_tokenizer(Path(folder), config["vocab_size"])
        before_s = time.monotonic()
        arguments = [
            *shlex.split(server["arguments"]),
            "--load-format",
            "dummy",
            "--served-model-name",
            server["model"],
        ]
        with started("vllm", folder, arguments, interpreter(Path(folder), server.get("cores"))) as url:
            click.echo(f"{name}: ready after {time.monotonic() - before_s:.0f} s")
            write_run(out, name)
            endpoint = Endpoint(url, vocabulary=config["vocab_size"])
            warm(endpoint, server["model"])
            for load in loads:
                if time.monotonic() < ends_s:
                    send(out / "loads" / name / load, endpoint, server["model"], load)


def interpreter(folder: Path, cores: int | None) -> str:
    """Return the interpreter of a server; one that may use only some cores is a script around it."""
    if cores is None:
        return sys.executable
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec taskset -c 0-{cores - 1} {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def warm(endpoint: Endpoint, model: str) -> None:
    scenario = scenario_of(model, PLAN["warmup"])
    bench(endpoint, generate(scenario.workload, 1), 1)


def scenario_of(model: str, workload: dict[str, Any]) -> Scenario:
    return scenario_from({"model": model, "deployment": {"device": "unknown"}, "workload": workload}, "", None)


def send(folder: Path, endpoint: Endpoint, model: str, load: str) -> None:
    """Send a load, and write its records with the times of day between which it ran."""
    scenario = scenario_of(model, PLAN["loads"][load])
    from_s = time.time()
    endpoint = replace(endpoint, sampling=request_sampling(scenario))
    run = bench(endpoint, generate(scenario.workload, scenario.seed), scenario.seed)
    summary = client_summary(run.requests, run.tokens, scenario.slo)
    about = {"model": run.model, "from_time_s": f"{from_s:.3f}", "until_time_s": f"{time.time():.3f}"}
    write_bench(folder, run.requests, run.tokens, bench_document(summary, about, scenario), scenario)
    click.echo(f"  {load}: {summary.num_requests} answered, {summary.num_failed} failed, {time.time() - from_s:.1f} s")


def write_run(out: Path, name: str) -> None:
    """Append a server's line to runs.csv: what `windtunnel validate --steps` and `observe` want to know."""
    import torch
    import vllm

    server = PLAN["servers"][name]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    row = {
        "run": name,
        "model": server["model"],
        "engine_args": f"{server['model']} {server['arguments']}",
        "vllm_version": vllm.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "driver": driver.stdout.strip(),
        "torch_version": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "runs.csv"
    is_new = not path.is_file()
    with path.open("a", newline="") as output:
        writer = csv.DictWriter(output, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
