"""`windtunnel simulate`: a scenario from a file and options, one run, its summary."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from windtunnel.cli.options import (
    ENGINE,
    SERVED,
    WRITTEN_FILE,
    HelpSection,
    Verb,
    all_of,
    deployment_options,
    general_options,
    options_of,
    sampling_options,
    scenario_file,
    scenario_of,
)
from windtunnel.cli.output import answer, remark, write_page
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.serving.results import Result

_LOAD, _OUTPUT = HelpSection("Load"), HelpSection("Result")

request_options = all_of(
    _LOAD("--input-tokens", metavar="N|MIN-MAX", help="Prompt tokens of a request."),
    _LOAD("--output-tokens", metavar="N|MIN-MAX", help="Generated tokens of a request."),
    _LOAD("--concurrency", type=int, help="Most requests in flight; alone: a closed loop."),
    _LOAD("--rate", type=float, help="Poisson arrivals a second: an open loop."),
    _LOAD("--num-requests", type=int, help="Requests in all.  [10 a client, or 1000]"),
    _LOAD("--trace", metavar="FILE", help="Recorded requests: CSV, JSONL, Parquet, or a catalog trace."),
    _LOAD("--seed", type=int, help="Seed of the random draws.  [the scenario's, or 0]"),
    sampling_options,
)
"""Options of the requests that are sent."""

load_options = all_of(
    SERVED("--replicas", type=int, help="Equal replicas.  [1]"),
    SERVED("--router", help="round_robin, ..., or your own: module:function."),
    ENGINE(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        is_flag=True,
        default=None,
        help="Compute the common beginning of prompts once.  [the engine's]",
    ),
    request_options,
)
"""Options of a load, and of the replicas that share it."""

slo_option = _OUTPUT.option("--slo", metavar="LIMITS", help="Limits for goodput: ttft=2s,tpot=50ms,e2e=30s.")


class RunFiles(NamedTuple):
    """Files that a run is written to."""

    out: Path | None = _OUTPUT(
        "--out",
        metavar="FOLDER",
        help="Write requests.parquet, steps.parquet, series.parquet, summary.json and the resolved scenario.yaml.",
    )
    html: Path | None = _OUTPUT("--html", type=WRITTEN_FILE, help="Write a page.")
    timeline: Path | None = _OUTPUT(
        "--timeline", help="Write a timeline that opens in ui.perfetto.dev: .json or .json.gz."
    )
    timeline_events: int | None = _OUTPUT("--timeline-events", help="Most events of the timeline.  [200000]")
    vidur_metrics: Path | None = _OUTPUT(
        "--vidur-metrics", help="Write the requests under Vidur's column names, as its request_metrics.csv."
    )
    overwrite: bool = _OUTPUT("--overwrite", help="Replace the files of a former run.")

    def check(self) -> None:
        """Raise InputError where one of the files cannot be written, before the run."""
        from windtunnel.formats.timeline.file import check_file
        from windtunnel.formats.vidur.write import check_metrics_file
        from windtunnel.report.serving.files import check_folder

        if self.out is not None:
            check_folder(self.out, self.overwrite)
        if self.timeline is not None:
            check_file(self.timeline, self.overwrite)
        elif self.timeline_events is not None:
            raise InputError("--timeline-events is the size of a --timeline", "name its file: --timeline run.json")
        if self.vidur_metrics is not None:
            check_metrics_file(self.vidur_metrics, self.overwrite)

    def write(self, result: "Result") -> None:
        """Write the requested files, and name them on stderr."""
        from windtunnel.formats.vidur.write import request_metrics, write_request_metrics
        from windtunnel.report.serving.files import write_run
        from windtunnel.report.serving.run import run_report

        if self.timeline is not None:
            _write_timeline(result, self.timeline, self.timeline_events)
        if self.out is not None:
            write_run(result, self.out)
            remark(f"wrote {self.out}")
        write_page(self.html, run_report, result)
        if self.vidur_metrics is not None:
            num_replicas = result.scenario.deployment.most_replicas
            columns = request_metrics(result.requests, result.steps, result.setup, num_replicas)
            write_request_metrics(self.vidur_metrics, columns)
            remark(f"wrote {self.vidur_metrics}")


@click.command(
    cls=Verb,
    epilog="Options override the file. vLLM's names work too: --tensor-parallel-size, --max-concurrency, "
    "--request-rate, --num-prompts, --random-input-len, --random-output-len.",
)
@scenario_file
@SERVED.option(
    "--from-command",
    metavar="COMMAND",
    help="A server's command line, or a file with one: vllm serve ..., sglang.launch_server ..., trtllm-serve ...",
)
@deployment_options
@load_options
@slo_option
@options_of(RunFiles)
@general_options
def command(files: RunFiles, scenario: Path | None, from_command: str | None, as_json: bool, **options: Any) -> None:
    """Predict latency, throughput and cost of a served model.

    \b
    windtunnel simulate --model llama-3.1-70b --device h100_sxm --tp 4 --quant fp8 \\
        --input-tokens 1024 --output-tokens 1024 --concurrency 64
    windtunnel simulate scenario.yaml --set workload.arrivals.rate_per_s=6.5 --json
    windtunnel simulate --from-command "vllm serve llama-3.1-8b -tp 2 --max-num-seqs 64" \\
        --device h100_sxm --rate 8 --input-tokens 1024 --output-tokens 256
    """
    described = scenario_of(scenario, options, _launched(from_command))
    files.check()

    # Loading the engine takes most of a second; wrong input is answered before.
    from windtunnel.cli.progress import counted
    from windtunnel.report.serving.run import run_document, run_report
    from windtunnel.serving.simulate import simulate

    with counted("simulating", "requests") as callback:
        result = simulate(described, progress=callback, allow_download=options["hub"])
    files.write(result)
    answer(as_json, run_document, run_report, result)


def _launched(text: str | None) -> dict[str, Any] | None:
    """Return the deployment of a server's command line; name on stderr those of its settings that are not predicted."""
    from windtunnel.formats.launch.read import read_launch_command

    if text is None:
        return None
    launch = read_launch_command(text)
    for line in launch.remarks:
        remark(line)
    return launch.raw


def _write_timeline(result: "Result", file: Path, max_events: int | None) -> None:
    """Write the timeline, and say on stderr how much of the run it shows."""
    from windtunnel.formats.timeline.write import MAX_EVENTS, write_timeline
    from windtunnel.report.version import version

    setup = result.setup
    about = {
        "producer": f"windtunnel {version()}",
        "model": setup.model.name,
        "device": setup.device.name,
        "engine": f"{setup.engine.name} {setup.engine.version}",
    }
    phases = None if result.fleet is None else result.fleet.phases
    limit = MAX_EVENTS if max_events is None else max_events
    detail = write_timeline(file, result.requests, result.steps, limit, about, phases)
    remark(f"wrote {file}: {format_count(detail.num_events, 'event')}")
    if not detail.is_complete:
        remark(f"in it {detail.sampling}; --timeline-events {2 * limit} shows more")
