"""`windtunnel lab kernels`, `lab to-table`, `lab scrub`: files of profilers."""

import click

from windtunnel import catalog
from windtunnel.cli.output import answer, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import unwritable
from windtunnel.files import csv_text, write_text
from windtunnel.formats.captures.capture import read_capture
from windtunnel.formats.captures.nsys import scrub_nsys
from windtunnel.formats.captures.step_operators import measured_steps, measurement_tables
from windtunnel.formats.captures.write import capture_document, kernel_rows, write_kernels
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.pricing.profile import write_profile
from windtunnel.report.lab.experiment import capture_report
from windtunnel.units import format_count


def kernels(options: Options) -> None:
    """Show where the time of a profile goes."""
    roofline = catalog.device(options.device) if options.device else None
    recorded = read_capture(options.capture)
    if options.parquet is not None:
        write_kernels(recorded, options.parquet)
        remark(f"wrote {options.parquet}")
    if options.csv_file is not None:
        write_text(options.csv_file, csv_text(*kernel_rows(recorded)))
        remark(f"wrote {options.csv_file}")
    shown = recorded, options.capture.name, roofline
    answer(options, lambda capture, *_: capture_document(capture), capture_report, *shown)


def scrub(options: Options) -> None:
    """Remove private rows from a capture of Nsight Systems."""
    number = scrub_nsys(options.capture)
    remark(f"removed {format_count(number, 'row')} from {options.capture}; the .nsys-rep beside it still has them")


def to_table(options: Options) -> None:
    """Turn the steps of a profile into measured operators."""
    spec, device_name = catalog.model(options.model), options.device_name
    recorded = read_capture(options.capture)
    steps = measured_steps(recorded, Shard(spec, spec.precision, Parallelism(tp=options.tp)))
    tables = measurement_tables(steps, f"{device_name}, {recorded.tool}")
    method, trace = f"steps under {recorded.tool}", options.capture.name
    about = {"device": device_name, "method": method, "model": spec.name, "trace": trace}
    try:
        written = write_profile(options.out, tables, about)
    except OSError as error:
        raise unwritable(options.out, error) from None
    for path in sorted(written):
        remark(f"wrote {path}")
    unmatched = sum(step.unmatched_fraction * sum(step.seconds.values()) for step in steps)
    total_s = sum(sum(step.seconds.values()) for step in steps)
    rows = sum(len(table) for table in tables)
    click.echo(
        f"{format_count(rows, 'point')} of {format_count(len(steps), 'step')}; "
        f"{unmatched / total_s:.1%} of the time belongs to no operator"
    )
