"""`windtunnel` itself: its verbs are imported when they run, so that `--help` is instant."""

from importlib import import_module

import click

from windtunnel.cli.options import VerbGroup

VERBS = {
    "simulate": ("serving.simulate", "Predict latency, throughput and cost of a served model."),
    "capacity": ("serving.capacity", "Find the greatest load that a deployment sustains within its limits."),
    "search": ("serving.search", "Find the cheapest deployment that meets the objective."),
    "whatif": ("serving.whatif", "Vary a few settings of a scenario and compare."),
    "train": ("training.train", "Predict a training job's step time, memory and cost."),
    "explain": ("serving.explain", "Show one forward step operator by operator."),
    "validate": ("serving.validate", "Predict measured runs and show how far off the predictions are."),
    "calibrate": ("serving.calibrate", "Fit host overheads and operator factors to measured runs."),
    "profile": ("lab.profile", "Measure operators, collectives and host overheads of this machine."),
    "bench": ("lab.bench", "Measure a real server under a simulation's workload."),
    "collective": ("network.collective", "Predict the time and bandwidth of one collective."),
    "network": ("network.network", "Run a training workload on a network (SimAI's job)."),
    "topology": ("network.topology", "Generate, show and check networks of GPUs."),
    "workload": ("training.workload", "Read workloads and traces; write jobs for SimAI, AICB and Chakra."),
    "lab": ("lab.lab", "Run and profile real models; compare them with a simulation."),
    "vidur": ("serving.vidur", "Run what a Vidur config.json describes, event for event."),
    "dashboard": ("dashboard", "Show results in the browser, compare them and try scenarios."),
    "tables": ("tables", "List, fetch and check the measured tables that price operators."),
    "catalog": ("catalog", "List known models, devices, nodes, engines and traces."),
}
"""Verb -> (module below `windtunnel.cli` that holds its `command`, its line of help)."""


class Verbs(VerbGroup):
    """A group whose commands live in modules of their own."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"windtunnel.cli.{VERBS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


def _show_version(ctx: click.Context, _param: click.Parameter, is_set: bool) -> None:
    if is_set:
        from windtunnel.report.version import version

        click.echo(f"windtunnel {version()}")
        ctx.exit()


@click.group(
    cls=Verbs,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: windtunnel simulate --model llama-3.1-8b --device h100_sxm --input-tokens 1024 "
    "--output-tokens 256 --concurrency 32",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.pass_context
def windtunnel(ctx: click.Context) -> None:
    """Predict how an LLM deployment performs before anyone rents the GPUs."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
