"""`windtunnel simulate`: a scenario from a file and options, one run, its summary."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import (
    WRITTEN_FILE,
    Verb,
    all_of,
    deployment_options,
    general_options,
    option,
    scenario_file,
    scenario_of,
)
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.serving.simulate import Result

_LOAD, _OUTPUT = "Load", "Result"

load_options = all_of(
    option("--replicas", section="What is served, on what", type=int, metavar="N", help="Equal copies.  [1]"),
    option(
        "--router",
        section="What is served, on what",
        metavar="NAME",
        help="round_robin, ..., or your own: module:function.",
    ),
    option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        section="Engine",
        default=None,
        help="Compute what prompts have in common once.  [the engine's]",
    ),
    option("--input-tokens", section=_LOAD, metavar="N|MIN-MAX", help="Prompt tokens of a request."),
    option("--output-tokens", section=_LOAD, metavar="N|MIN-MAX", help="Generated tokens of a request."),
    option(
        "--concurrency",
        section=_LOAD,
        type=int,
        metavar="N",
        help="Most requests under way; alone: a closed loop.",
    ),
    option("--rate", section=_LOAD, type=float, metavar="X", help="Poisson arrivals a second: an open loop."),
    option("--num-requests", section=_LOAD, type=int, metavar="N", help="Requests in all.  [10 a client, or 1000]"),
    option(
        "--trace", section=_LOAD, metavar="FILE", help="Recorded requests: CSV, JSONL, Parquet, or a catalog trace."
    ),
    option("--seed", section=_LOAD, type=int, metavar="N", help="Of the random draws.  [0]"),
)
"""What a deployment serves, and how many copies do."""

result_options = all_of(
    option("--slo", section=_OUTPUT, metavar="LIMITS", help="For goodput: ttft=2s,tpot=50ms,e2e=30s."),
    option(
        "--out",
        section=_OUTPUT,
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Write requests.parquet, steps.parquet, series.parquet, summary.json and the resolved scenario.yaml.",
    ),
    option("--html", section=_OUTPUT, type=WRITTEN_FILE, metavar="FILE", help="Write a page."),
    option(
        "--timeline",
        section=_OUTPUT,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write a timeline that opens in ui.perfetto.dev: .json or .json.gz.",
    ),
    option("--timeline-events", section=_OUTPUT, type=int, metavar="N", help="Most events of it.  [200000]"),
    option(
        "--vidur-metrics",
        section=_OUTPUT,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the requests under Vidur's column names, as its request_metrics.csv.",
    ),
    option("--overwrite", section=_OUTPUT, is_flag=True, help="Replace the files of a former run."),
)


@click.command(
    cls=Verb,
    epilog="Options override the file. vLLM's names work too: --tensor-parallel-size, --max-concurrency, "
    "--request-rate, --num-prompts, --random-input-len, --random-output-len.",
)
@scenario_file
@option(
    "--from-command",
    section="What is served, on what",
    metavar="COMMAND",
    help="A server's command line, or a file with one: vllm serve ..., sglang.launch_server ..., trtllm-serve ...",
)
@deployment_options
@load_options
@result_options
@general_options
def command(
    scenario: Path | None,
    from_command: str | None,
    out: Path | None,
    html: Path | None,
    timeline: Path | None,
    timeline_events: int | None,
    vidur_metrics: Path | None,
    overwrite: bool,
    as_json: bool,
    hub: bool,
    **options: Any,
) -> None:
    """Predict latency, throughput and cost of a served model.

    \b
    windtunnel simulate --model llama-3.1-70b --device h100_sxm --tp 4 --quant fp8 \\
        --input-tokens 1024 --output-tokens 1024 --concurrency 64
    windtunnel simulate scenario.yaml --set workload.arrivals.rate_per_s=6.5 --json
    windtunnel simulate --from-command "vllm serve llama-3.1-8b -tp 2 --max-num-seqs 64" \\
        --device h100_sxm --rate 8 --input-tokens 1024 --output-tokens 256
    """
    from windtunnel.formats.timeline.file import check_file
    from windtunnel.formats.vidur.write import check_metrics_file, request_metrics, write_request_metrics
    from windtunnel.report.serving.files import check_folder, write_run

    wanted = scenario_of(scenario, hub=hub, base=_launched(from_command), **options)
    if out is not None:
        check_folder(out, overwrite)
    if timeline is not None:
        check_file(timeline, overwrite)
    elif timeline_events is not None:
        raise InputError("--timeline-events is the size of a --timeline", "name its file: --timeline run.json")

    if vidur_metrics is not None:
        check_metrics_file(vidur_metrics, overwrite)

    # Loading the engine takes most of a second; wrong input is answered before.
    from windtunnel.cli.progress import progress
    from windtunnel.files import write_text
    from windtunnel.report.documents import as_text, run_document
    from windtunnel.report.render.tables import show
    from windtunnel.report.serving.page import run_page
    from windtunnel.report.serving.run import run_report
    from windtunnel.serving.run import simulate

    with progress() as callback:
        result = simulate(wanted, progress=callback, allow_download=hub)
    if timeline is not None:
        _write_timeline(result, timeline, timeline_events)
    if out is not None:
        write_run(result, out)
        click.echo(f"wrote {out}", err=True)
    if html is not None:
        write_text(html, run_page(result))
        click.echo(f"wrote {html}", err=True)
    if vidur_metrics is not None:
        columns = request_metrics(result.requests, result.steps, result.setup, result.scenario.deployment.most_replicas)
        write_request_metrics(vidur_metrics, columns)
        click.echo(f"wrote {vidur_metrics}", err=True)
    if as_json:
        click.echo(as_text(run_document(result)))
    else:
        show(*run_report(result))


def _launched(text: str | None) -> dict[str, Any] | None:
    """The deployment of a server's command line; says on stderr what of it is not in the prediction."""
    from windtunnel.formats.launch.read import read_launch_command

    if text is None:
        return None
    found = read_launch_command(text)
    remarks = (
        ("without effect on time", found.without_effect),
        ("not modelled", found.not_modelled),
        ("unknown, ignored", found.unknown),
    )
    for remark, names in remarks:
        if names:
            click.echo(f"{remark}: {', '.join(names)}", err=True)
    return found.raw


def _write_timeline(result: "Result", file: Path, max_events: int | None) -> None:
    """Write it, and say on stderr how much of the run it shows."""
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
    most = MAX_EVENTS if max_events is None else max_events
    detail = write_timeline(file, result.requests, result.steps, most, about, phases)
    click.echo(f"wrote {file}: {format_count(detail.num_events, 'event')}", err=True)
    if not detail.is_complete:
        click.echo(f"in it {detail.sampling}; --timeline-events {2 * most} shows more", err=True)
