"""`windtunnel explain`: one forward step, operator by operator."""

from dataclasses import replace

from windtunnel.cli.options import launched, scenario_of
from windtunnel.cli.output import answer, remark
from windtunnel.cli.verbs import Options
from windtunnel.report.serving.step import step_document, step_report
from windtunnel.serving.explain import explain_step, pool_of_step, step_batch
from windtunnel.serving.scenario import pool_scenario, resolve

PROMPT_TOKENS = 2048
"""Tokens of the prompt that a pool for prefill computes where none are given."""


def command(options: Options) -> None:
    """Show one forward step operator by operator."""
    if options.scenario is None:
        # A step has no workload, but a scenario has.
        options.concurrency, options.input_tokens, options.output_tokens = max(options.batch or 0, 1), "1", "1"
    launch = launched(options)
    scenario = scenario_of(options, base=launch.raw)
    batch, prefill_tokens = options.batch, options.prefill_tokens or 0
    is_decode = None if batch is None and not prefill_tokens else bool(batch)
    pool = pool_of_step(scenario.deployment, options.pool, is_decode)
    if pool.role == "prefill" and is_decode is None:
        prefill_tokens = PROMPT_TOKENS
    if batch is None:
        batch = 0 if prefill_tokens else 64
    context = 2048 if options.context is None else options.context
    step = step_batch(batch, context, prefill_tokens, options.prefill_context or 0)
    setup = resolve(pool_scenario(scenario, pool), allow_download=options.hub)
    explanation = replace(explain_step(setup, step, workload=scenario.workload), pool=pool.name)
    if others := [each.name for each in scenario.deployment.groups if each.name != pool.name]:
        remark(f"a step of the pool {pool.name}; --pool {' or '.join(others)} explains another")
    answer(options, step_document, step_report, explanation, launch=launch)
