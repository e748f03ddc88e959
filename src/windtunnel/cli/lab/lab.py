"""`windtunnel lab`: run and profile real models, and replay communication."""

from pathlib import Path

import click

from windtunnel.cli.lab.capture import kernels, scrub, to_table
from windtunnel.cli.lab.compare import compare
from windtunnel.cli.lab.run import run, sweep
from windtunnel.cli.options import PATH, Verb, VerbGroup, assignments, options_in, quantity
from windtunnel.cli.output import answer
from windtunnel.units import format_count


@click.group(cls=VerbGroup, no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Run real models, profile them, and compare measurements with simulations."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command(cls=Verb, short_help="Carry out a training job's communication here.")
@click.argument("job", type=PATH, metavar="JOB.yaml")
@options_in("lab_replay", "json")
def replay(job: Path, largest_message: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Carry out the communication of a training job's step between processes of this machine, without a GPU.

    Every collective and every message between stages is executed over gloo with data whose result is known: a test of
    the job's groups, sizes and schedule. It needs torch, and at most 16 ranks.

    \b
    windtunnel lab replay job.yaml --set parallelism.tp=2 --set parallelism.dp=2
    """
    from windtunnel.formats.collective_calls import Contents
    from windtunnel.lab.replay import replay as run
    from windtunnel.report.workload import contents_document, contents_report
    from windtunnel.training.job import load
    from windtunnel.training.setup import resolve
    from windtunnel.units import format_bytes

    largest = quantity("--largest-message", "message_bytes", largest_message)
    done = run(resolve(load(job, assignments(settings))), int(largest))
    facts = (
        ("ranks", f"{format_count(done.num_ranks, 'process', 'processes')}, gloo"),
        ("checked", f"{format_count(done.num_checked, 'result')}, all right"),
        ("cut", f"messages above {format_bytes(done.largest_bytes)} carried a part of their data"),
        ("shown", "rank 0, one step, times of this machine"),
    )
    contents = Contents("replay", facts, done.calls)
    checked = {"num_checked": done.num_checked}
    answer(as_json, lambda replayed: contents_document(replayed) | checked, contents_report, contents)


for part in (run, sweep, compare, kernels, to_table, scrub):
    command.add_command(part)
