"""`windtunnel explain`: one forward step, operator by operator."""

from pathlib import Path
from typing import Any

import click

from windtunnel.cli.options import Verb, all_of, deployment_options, general_options, option, scenario_file, scenario_of

_STEP = "Step"

step_options = all_of(
    option(
        "--batch",
        section=_STEP,
        type=int,
        metavar="N",
        help="Requests that decode one token.  [64, or 0 with a prefill]",
    ),
    option("--context", section=_STEP, type=int, metavar="N", help="Tokens that each of them attends to.  [2048]"),
    option("--prefill-tokens", section=_STEP, type=int, metavar="N", help="Prompt tokens computed in the step.  [0]"),
    option(
        "--prefill-context", section=_STEP, type=int, metavar="N", help="Of that prompt, tokens already cached.  [0]"
    ),
)


@click.command(cls=Verb)
@scenario_file
@deployment_options
@step_options
@general_options
def command(
    scenario: Path | None,
    batch: int | None,
    context: int | None,
    prefill_tokens: int | None,
    prefill_context: int | None,
    as_json: bool,
    hub: bool,
    **options: Any,
) -> None:
    """Show one forward step operator by operator: seconds, work, what bounds it, and how its time is known.

    \b
    windtunnel explain --model llama-3.1-70b --device h100_sxm --tp 4 --quant fp8 \\
        --batch 64 --context 2048
    windtunnel explain scenario.yaml --prefill-tokens 8192 --json
    """
    from windtunnel.report.documents import as_text, step_document
    from windtunnel.report.render.tables import show
    from windtunnel.report.serving.step import step_report
    from windtunnel.serving.explain import explain_step, step_batch
    from windtunnel.serving.scenario import resolve

    if batch is None:
        batch = 0 if prefill_tokens else 64
    step = step_batch(batch, 2048 if context is None else context, prefill_tokens or 0, prefill_context or 0)
    if scenario is None:
        # A step has no workload, but a scenario has.
        options |= {"concurrency": max(batch, 1), "input_tokens": "1", "output_tokens": "1"}
    setup = resolve(scenario_of(scenario, hub=hub, **options), allow_download=hub)
    explanation = explain_step(setup, step)
    if as_json:
        click.echo(as_text(step_document(explanation)))
    else:
        show(*step_report(explanation))
