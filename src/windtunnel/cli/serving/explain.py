"""`windtunnel explain`: one forward step, operator by operator."""

from pathlib import Path
from typing import Any

import click

from windtunnel.cli.options import (
    HelpSection,
    Verb,
    deployment_options,
    general_options,
    sampling_options,
    scenario_file,
    scenario_of,
)
from windtunnel.cli.output import answer

_STEP = HelpSection("Step")


@click.command(cls=Verb)
@scenario_file
@deployment_options
@_STEP.option("--batch", type=int, help="Requests that decode one token.  [64, or 0 with a prefill]")
@_STEP.option("--context", type=int, help="Tokens that each of them attends to.  [2048]")
@_STEP.option("--prefill-tokens", type=int, help="Prompt tokens computed in the step.  [0]")
@_STEP.option("--prefill-context", type=int, help="Tokens of that prompt that are cached already.  [0]")
@sampling_options
@general_options
def command(
    scenario: Path | None,
    batch: int | None,
    context: int | None,
    prefill_tokens: int | None,
    prefill_context: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show one forward step operator by operator: seconds, work, what bounds it, and how its time is known.

    \b
    windtunnel explain --model llama-3.1-70b --device h100_sxm --tp 4 --quant fp8 \\
        --batch 64 --context 2048
    windtunnel explain scenario.yaml --prefill-tokens 8192 --json
    """
    from windtunnel.report.serving.step import step_document, step_report
    from windtunnel.serving.explain import explain_step, step_batch
    from windtunnel.serving.scenario import resolve

    if batch is None:
        batch = 0 if prefill_tokens else 64
    step = step_batch(batch, 2048 if context is None else context, prefill_tokens or 0, prefill_context or 0)
    if scenario is None:
        # A step has no workload, but a scenario has.
        options |= {"concurrency": max(batch, 1), "input_tokens": "1", "output_tokens": "1"}
    setup = resolve(scenario_of(scenario, options), allow_download=options["hub"])
    explanation = explain_step(setup, step)
    answer(as_json, step_document, step_report, explanation)
