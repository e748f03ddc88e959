"""`windtunnel explain`: one forward step, operator by operator."""

from pathlib import Path
from typing import Any

import click

from windtunnel.cli.options import Verb, options_in, scenario_file, scenario_of
from windtunnel.cli.output import answer


@click.command(cls=Verb)
@scenario_file
@options_in("deployment", "explain", "sampling", "general", "hub", "json")
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
