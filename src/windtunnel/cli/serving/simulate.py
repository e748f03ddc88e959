"""`windtunnel simulate`: a scenario from a file and options, one run, its summary."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from windtunnel.cli.options import Verb, launched, options_in, options_of, scenario_file, scenario_of
from windtunnel.cli.output import answer, remark, write_page
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.serving.results import Result


class RunFiles(NamedTuple):
    """Files that a run is written to."""

    out: Path | None
    html: Path | None
    timeline: Path | None
    timeline_events: int | None
    vidur_metrics: Path | None
    overwrite: bool

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
@options_in("simulate", "deployment", "load", "requests", "sampling", "slo")
@options_of(RunFiles)
@options_in("general", "hub", "json")
def command(files: RunFiles, scenario: Path | None, from_command: str | None, as_json: bool, **options: Any) -> None:
    """Predict latency, throughput and cost of a served model.

    \b
    windtunnel simulate --model llama-3.1-70b --device h100_sxm --tp 4 --quant fp8 \\
        --input-tokens 1024 --output-tokens 1024 --concurrency 64
    windtunnel simulate scenario.yaml --set workload.arrivals.rate_per_s=6.5 --json
    windtunnel simulate --from-command "vllm serve llama-3.1-8b -tp 2 --max-num-seqs 64" \\
        --device h100_sxm --rate 8 --input-tokens 1024 --output-tokens 256
    """
    described = scenario_of(scenario, options, launched(from_command))
    files.check()

    # Loading the engine takes most of a second; wrong input is answered before.
    from windtunnel.cli.progress import counted
    from windtunnel.report.serving.run import run_document, run_report
    from windtunnel.serving.simulate import simulate

    with counted("simulating", "requests") as callback:
        result = simulate(described, progress=callback, allow_download=options["hub"])
    files.write(result)
    answer(as_json, run_document, run_report, result)


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
