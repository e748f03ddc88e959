"""`windtunnel lab kernels`, `lab to-table`, `lab scrub`: files of profilers."""

from pathlib import Path

import click

from windtunnel.cli.options import PATH, Verb, options_in
from windtunnel.cli.output import remark, write_page
from windtunnel.errors import InputError, unwritable
from windtunnel.model.shape import Shard
from windtunnel.units import format_count


@click.command(cls=Verb, short_help="Show where the time of a profile goes.")
@click.argument("capture", type=PATH, metavar="CAPTURE")
@options_in("lab_kernels")
def kernels(
    capture: Path, html: Path | None, parquet: Path | None, csv_file: Path | None, device: str | None, as_json: bool
) -> None:
    """Show where the time of a profile goes: kernels, API calls, copies, gaps and overlap.

    CAPTURE is Nsight Systems' SQLite, Nsight Compute's CSV or the JSON of torch.profiler.

    \b
    windtunnel lab kernels profile.sqlite --html kernels.html
    windtunnel lab kernels trace.json.gz --json
    """
    from windtunnel import catalog
    from windtunnel.files import csv_text, write_text
    from windtunnel.formats.captures.capture import read_capture
    from windtunnel.formats.captures.write import as_json as json_text
    from windtunnel.formats.captures.write import capture_document, kernel_rows, write_kernels
    from windtunnel.report.lab.experiment import capture_report
    from windtunnel.report.render.terminal import show

    roofline = catalog.device(device) if device else None
    if roofline is not None and html is None:
        raise InputError("--device is for the roofline of a page", "name the page: --html kernels.html")
    recorded = read_capture(capture)
    write_page(html, capture_report, recorded, capture.name, roofline)
    if parquet is not None:
        write_kernels(recorded, parquet)
        remark(f"wrote {parquet}")
    if csv_file is not None:
        write_text(csv_file, csv_text(*kernel_rows(recorded)))
        remark(f"wrote {csv_file}")
    if as_json:
        click.echo(json_text(capture_document(recorded)), nl=False)
    else:
        show(capture_report(recorded))


@click.command(cls=Verb, short_help="Remove private rows from an nsys capture.")
@click.argument("capture", type=PATH, metavar="CAPTURE.sqlite")
def scrub(capture: Path) -> None:
    """Remove environment variables, users, hosts and folders from a capture of Nsight Systems, in place.

    \b
    windtunnel lab scrub profile.sqlite
    """
    from windtunnel.formats.captures.nsys import scrub_nsys

    number = scrub_nsys(capture)
    remark(f"removed {format_count(number, 'row')} from {capture}; the .nsys-rep beside it still has them")


@click.command("to-table", cls=Verb, short_help="Turn a profile into measured operators.")
@click.argument("capture", type=PATH, metavar="CAPTURE")
@options_in("lab_to_table")
def to_table(capture: Path, model: str, tp: int, device_name: str, out: Path) -> None:
    """Turn the steps of a profile into measured operators that estimators read.

    The steps must be named after their batch: by `windtunnel lab run`, or by vLLM with detailed_trace_annotation.

    \b
    windtunnel lab to-table trace.json.gz --model config.json --device-name my_cpu --out profiles/my_cpu
    """
    from windtunnel import catalog
    from windtunnel.formats.captures.capture import read_capture
    from windtunnel.formats.captures.step_operators import measured_steps, measurement_tables
    from windtunnel.model.parallelism import Parallelism
    from windtunnel.pricing.profile import write_profile

    spec = catalog.model(model)
    recorded = read_capture(capture)
    steps = measured_steps(recorded, Shard(spec, spec.precision, Parallelism(tp=tp)))
    tables = measurement_tables(steps, f"{device_name}, {recorded.tool}")
    about = {"device": device_name, "method": f"steps under {recorded.tool}", "model": spec.name, "trace": capture.name}
    try:
        written = write_profile(out, tables, about)
    except OSError as error:
        raise unwritable(out, error) from None
    for path in sorted(written):
        remark(f"wrote {path}")
    unmatched = sum(step.unmatched_fraction * sum(step.seconds.values()) for step in steps)
    total_s = sum(sum(step.seconds.values()) for step in steps)
    rows = sum(len(table) for table in tables)
    click.echo(
        f"{format_count(rows, 'point')} of {format_count(len(steps), 'step')}; "
        f"{unmatched / total_s:.1%} of the time belongs to no operator"
    )
