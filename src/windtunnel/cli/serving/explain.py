"""`windtunnel explain`: one forward step, operator by operator."""

from windtunnel.cli.options import launched, scenario_of
from windtunnel.cli.output import answer
from windtunnel.cli.verbs import Options
from windtunnel.report.serving.step import step_document, step_report
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.scenario import resolve


def command(options: Options) -> None:
    """Show one forward step operator by operator."""
    batch, prefill_tokens = options.batch, options.prefill_tokens or 0
    if batch is None:
        batch = 0 if prefill_tokens else 64
    context = 2048 if options.context is None else options.context
    step = step_batch(batch, context, prefill_tokens, options.prefill_context or 0)
    if options.scenario is None:
        # A step has no workload, but a scenario has.
        options.concurrency, options.input_tokens, options.output_tokens = max(batch, 1), "1", "1"
    launch = launched(options)
    scenario = scenario_of(options, base=launch.raw)
    explanation = explain_step(resolve(scenario, allow_download=options.hub), step, workload=scenario.workload)
    answer(options, step_document, step_report, explanation, launch=launch)
