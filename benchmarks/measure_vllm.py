"""Serve models with random weights by vLLM on the GPU at hand, and record steps and requests under several loads.

    python benchmarks/measure_vllm.py --out measured/h100 --configs FOLDER --server llama-8b --server qwen3-30b
    python benchmarks/measure_vllm.py --out measured/cpu --plan measure_vllm_cpu.yaml  # vLLM's CPU build

Every server of the plan is started once and takes all of its loads, one after the other; what is measured is
kept, and the command goes on where it stopped. OUT then holds `runs.csv` (what was served, by which version, on what),
`steps/` (a row for each forward pass, by `windtunnel.lab.step_recorder`) and `loads/SERVER/LOAD`, the records of
`windtunnel bench` with the server's /metrics before and after. FOLDER holds the models' config.json; without weights,
every expert is about equally likely.

    nvidia-smi --query-gpu=timestamp,power.draw,clocks.sm --format=csv,nounits -lms 100 > OUT/power.csv   # meanwhile
    python benchmarks/measure_vllm.py --out OUT --collect measured/h100   # what is kept of it

Then every load is a run of its own, with its steps, the mean power and clock, and what was made to happen.
"""

import csv
import functools
import gzip
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from windtunnel.cli.lab.bench import request_sampling
from windtunnel.errors import WindtunnelError
from windtunnel.lab.bench.client import Endpoint, bench
from windtunnel.lab.profile.machine import cpu_name
from windtunnel.lab.servers import started
from windtunnel.lab.step_recorder import VARIABLE
from windtunnel.lab.tiny_models import write_tokenizer
from windtunnel.metrics.client import client_summary
from windtunnel.report.lab.bench import bench_document, write_bench
from windtunnel.schema import read_yaml
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.workload.generate.requests import generate

PLAN: dict[str, Any] = {}
"""Servers and loads, of the file that --plan names."""
CPU_PERIOD_US = 10_000
"""Period within which `limit_cpu` keeps its share."""


@click.command()
@click.option("--plan", default="measure_vllm.yaml", help="Servers and loads, beside this script.  [measure_vllm.yaml]")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of all results.")
@click.option("--configs", type=click.Path(path_type=Path), help="Folder of MODEL/config.json.")
@click.option("--server", "servers", multiple=True, help="What to serve.  [all]")
@click.option("--loads", default=None, help="Names of loads, by commas.  [the server's]")
@click.option("--minutes", type=float, default=25.0, help="Begin no load after so many.  [25]")
@click.option("--collect", "kept", type=click.Path(path_type=Path), help="Measure nothing; write what was to a folder.")
def main(
    plan: str,
    out: Path,
    configs: Path | None,
    servers: tuple[str, ...],
    loads: str | None,
    minutes: float,
    kept: Path | None,
) -> None:
    read_plan(plan)
    if kept is not None:
        collect(out, kept)
        return
    os.environ.update(PLAN.get("environment", {}))
    ends_s = time.monotonic() + 60 * minutes
    for name in servers or PLAN["servers"]:
        server = PLAN["servers"][name]
        wanted = loads.split(",") if loads else server["loads"]
        left = [load for load in wanted if not (out / "loads" / name / load / "summary.json").is_file()]
        if left and time.monotonic() < ends_s:
            try:
                serve(out, configs, name, left, ends_s)
            except WindtunnelError as error:
                click.echo(f"{name}: {error}", err=True)


def read_plan(name: str) -> None:
    """Take a plan's servers and loads for `PLAN`."""
    PLAN.clear()
    PLAN.update(read_yaml(Path(__file__).with_name(name)))


def config_of(server: dict[str, Any], configs: Path | None) -> dict[str, Any]:
    """Return a server's config.json: the plan's own, or a file of the folder."""
    if "config" in PLAN:
        return dict(PLAN["config"])
    if configs is None:
        raise click.UsageError("--configs is needed")
    return dict(json.loads((configs / server["config"]).read_text()))


def serve(out: Path, configs: Path | None, name: str, loads: list[str], ends_s: float) -> None:
    """Start a server and send it loads."""
    server = PLAN["servers"][name]
    config = config_of(server, configs)
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
            if not fault_of(loads[0]).get("cold"):
                warm(endpoint, server["model"])
            for load in loads:
                if time.monotonic() < ends_s:
                    with made(fault_of(load)):
                        send(out / "loads" / name / load, endpoint, server["model"], load)


def interpreter(folder: Path, cores: int | None) -> str:
    """Return the interpreter of a server; one that may use only some cores is a script around it."""
    if cores is None:
        return sys.executable
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec taskset -c 0-{cores - 1} {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def fault_of(load: str) -> dict[str, Any]:
    fault: dict[str, Any] = PLAN["loads"][load].get("fault", {})
    return fault


@contextmanager
def made(fault: dict[str, Any]) -> Iterator[None]:
    """Let something happen to the server, or to its client, in the block."""
    server, cores = descendants(os.getpid()), os.sched_getaffinity(0)
    affinities = {thread: os.sched_getaffinity(thread) for thread in threads_of([*server, os.getpid()])}
    others: list[subprocess.Popen[bytes]] = []
    try:
        if "server_cores" in fault:
            keep_to(server, set(range(fault["server_cores"])))
        if fault.get("shared_gpu"):
            others.append(disturbance("products"))
            time.sleep(8)
        if "shared_core" in fault:
            others.append(disturbance("spin"))
            keep_to([others[-1].pid], {fault["shared_core"]})
        if "cpu_share" in fault:
            limit_cpu(server, fault["cpu_share"])
        if "stall_s" in fault:
            engine = max(server, key=resident_pages)
            others.append(disturbance("stalls", engine, fault["stall_s"], fault["every_s"]))
        if "client_hogs" in fault:
            keep_to([os.getpid()], {max(cores)})  # those that it starts inherit the core
            others.extend(disturbance("spin") for _ in range(fault["client_hogs"]))
        yield
    finally:
        for other in others:
            other.terminate()
            other.wait()
        for thread, usual in affinities.items():
            with suppress(OSError):
                os.sched_setaffinity(thread, usual)
        if "cpu_share" in fault:
            limit_cpu(server, None)


def disturbance(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(Path(__file__).with_name("disturb.py")), *map(str, words)])


def descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(process, []))
    for each in found:
        found.extend(children.get(each, []))
    return found


def threads_of(processes: Iterable[int]) -> list[int]:
    """Return the threads of processes that still run."""
    return [int(path.name) for process in processes for path in Path(f"/proc/{process}/task").glob("*")]


def keep_to(processes: Iterable[int], cores: set[int]) -> None:
    """Let all threads of processes run on some cores only."""
    for thread in threads_of(processes):
        with suppress(OSError):
            os.sched_setaffinity(thread, cores)


def limit_cpu(processes: Iterable[int], share: float | None) -> None:
    """Let processes together compute for a share of one core's time; None: as long as they like (Linux, cgroup v1)."""
    root = Path("/sys/fs/cgroup/cpu")
    group = root / "measure_vllm" if share else root
    group.mkdir(exist_ok=True)
    if share:
        (group / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(CPU_PERIOD_US * share)))
    for process in processes:
        (group / "cgroup.procs").write_text(str(process))


def resident_pages(process: int) -> int:
    """Return the pages of memory that a process holds; of a server's, the engine has the most."""
    try:
        return int((Path("/proc") / str(process) / "statm").read_text().split()[1])
    except OSError:
        return 0


def warm(endpoint: Endpoint, model: str) -> None:
    scenario = scenario_of(model, PLAN["warmup"])
    bench(endpoint, generate(scenario.workload, 1), 1)


def workload_of(load: str) -> dict[str, Any]:
    planned = PLAN["loads"][load]
    workload = PLAN["loads"][planned.get("like", load)]
    return {key: value for key, value in workload.items() if key not in {"fault", "seed"}}


def metrics(endpoint: Endpoint) -> str:
    """Return what the server's /metrics says of the engine."""
    with urllib.request.urlopen(endpoint.url.removesuffix("/v1") + "/metrics") as answer:
        text: str = answer.read().decode()
    return "\n".join(line for line in text.splitlines() if "vllm:" in line) + "\n"


def scenario_of(model: str, workload: dict[str, Any]) -> Scenario:
    return scenario_from({"model": model, "deployment": {"device": "unknown"}, "workload": workload}, "", None)


def send(folder: Path, endpoint: Endpoint, model: str, load: str) -> None:
    """Send a load, and write its records with the times of day between which it ran."""
    scenario = scenario_of(model, workload_of(load))
    endpoint = replace(endpoint, sampling=request_sampling(scenario))
    before, from_s = metrics(endpoint), time.time()
    scenario = msgspec.structs.replace(scenario, seed=PLAN["loads"][load].get("seed", scenario.seed))
    run = bench(endpoint, generate(scenario.workload, scenario.seed), scenario.seed)
    after = metrics(endpoint)
    summary = client_summary(run.requests, run.tokens, scenario.slo)
    about = {"model": run.model, "from_time_s": f"{from_s:.3f}", "until_time_s": f"{time.time():.3f}"}
    write_bench(folder, run.requests, run.tokens, bench_document(summary, about, scenario), scenario)
    for name, text in (("before", before), ("after", after)):
        (folder / f"{name}.prom").write_text(text)
    click.echo(f"  {load}: {summary.num_requests} answered, {summary.num_failed} failed, {time.time() - from_s:.1f} s")


def write_run(out: Path, name: str) -> None:
    """Append a server's line to runs.csv: what `windtunnel validate --steps` and `observe` want to know."""
    import torch
    import vllm

    server = PLAN["servers"][name]
    driver = ""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    row = {
        "run": name,
        "model": server["model"],
        "engine_args": f"{server['model']} {server['arguments']}",
        "vllm_version": vllm.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "driver": driver,
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


def collect(out: Path, kept: Path) -> None:
    """Write the loads of a folder as runs of their own: `runs.csv`, `steps.csv.gz`, requests and metrics."""
    served = {row["run"]: row for row in csv.DictReader((out / "runs.csv").open())}
    draws = power_samples(out / "power.csv")
    lines, steps = [], []
    for summary in sorted(out.glob("loads/*/*/summary.json")):
        server, load = summary.parts[-3:-1]
        document = json.loads(summary.read_text())
        from_s, until_s = float(document["from_time_s"]), float(document["until_time_s"])
        own = [each for each in read_steps(out, server) if from_s <= float(each["ended_time_s"]) <= until_s + 0.5]
        steps += [{"run": f"{server}/{load}", **each} for each in own]
        inside = [each for each in draws if from_s + 1 <= each[0] <= until_s - 1]
        watts, mhz = (round(float(np.mean([each[at] for each in inside]))) if inside else "" for at in (1, 2))
        fault = json.dumps(fault_of(load)) if fault_of(load) else ""
        about = {"seconds": round(until_s - from_s, 2), "watts": watts, "sm_mhz": mhz, "fault": fault}
        lines.append({**served[server], "run": f"{server}/{load}", **about})
        folder = kept / "loads" / server / load
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("requests.parquet", "scenario.yaml"):
            shutil.copy(summary.parent / name, folder / name)
        for name in ("before.prom", "after.prom"):
            content = (summary.parent / name).read_bytes()
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
    for path, rows in ((kept / "runs.csv", lines), (kept / "steps.csv.gz", steps)):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


@functools.cache
def read_steps(out: Path, server: str) -> list[dict[str, str]]:
    with (out / "steps" / f"{server}.csv").open() as file:
        return list(csv.DictReader(file))


def power_samples(path: Path) -> list[tuple[float, float, float]]:
    """Return time of day (UTC), watts and MHz of each line of nvidia-smi; none where it did not run."""
    samples = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        cells = [cell.strip() for cell in line.split(",")]
        if cells[0][:1].isdigit() and len(cells) >= 3:
            at = datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=UTC)
            samples.append((at.timestamp(), float(cells[1]), float(cells[2])))
    return samples


if __name__ == "__main__":
    sys.exit(main())
