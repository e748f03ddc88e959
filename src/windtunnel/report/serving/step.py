"""The tables of one explained step."""

from rich.console import RenderableType

from windtunnel.model import operators as ops
from windtunnel.report.render.tables import bars, columns, grid, number, percent, title
from windtunnel.report.serving.setup import deployment_line, model_line, network_lines, provenance_rows
from windtunnel.serving.explain import ExplainedLaunch, Explanation
from windtunnel.units import format_bytes, format_count, format_seconds, format_si

TIME_HEADS = ("operator", "runs", "each", "total", "share", "bound by", "found")
WORK_HEADS = ("work of one run", "shape", "FLOP", "of peak", "bytes", "of peak")


def step_report(step: Explanation) -> list[RenderableType]:
    """Return the operators of a step in the order of a layer, their sums, memory, and the sources of their times."""
    return [
        title(model_line(step.setup)),
        deployment_line(step.setup),
        *network_lines(step.setup.network),
        batch_line(step),
        "",
        columns(TIME_HEADS, [time_row(launch, step.device_s) for launch in step.launches]),
        "",
        columns(WORK_HEADS, [work_row(launch) for launch in step.launches], left=2),
        "",
        grid(totals_rows(step)),
        "",
        title(f"Where the device's time goes: bound by {step.bound_by}"),
        bars(_shares(step.seconds_by(lambda launch: launch.bound_by))),
        "",
        bars(
            {name.replace("_", " "): share for name, share in _shares(step.seconds_by(lambda op: op.op.kind)).items()}
        ),
        "",
        title("Where the operator times come from"),
        grid(
            provenance_rows(
                _shares(step.seconds_by(lambda launch: launch.coverage.value)),
                _shares(step.seconds_by(lambda launch: launch.source)),
            )
        ),
    ]


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    whole_s = sum(seconds.values())
    return {name: part / whole_s for name, part in seconds.items()}


def batch_line(step: Explanation) -> str:
    """Describe the batch of a step."""
    batch = step.batch
    parts = []
    if batch.decode_requests:
        parts.append(
            f"{format_count(batch.decode_requests, 'decoding request')} of {batch.decode_context_tokens:,.0f} tokens"
        )
    if batch.prefill_tokens:
        cached = batch.prefill_pairs / batch.prefill_tokens - 0.5 * batch.prefill_tokens
        after = f" after {cached:,.0f}" if cached else ""
        parts.append(f"a prompt chunk of {format_count(batch.prefill_tokens, 'token')}{after}")
    padded = step.num_computed_tokens != batch.num_tokens
    note = f", padded to the CUDA graph of {step.num_computed_tokens:,}" if padded else ""
    ranks = step.setup.parallelism.attention_dp
    where = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"one step{where}: {' and '.join(parts)}{note}"


def time_row(launch: ExplainedLaunch, device_s: float) -> list[str]:
    """Return an operator's time, under `TIME_HEADS`."""
    return [
        launch.name,
        f"{launch.count:g}",
        format_seconds(launch.each_s),
        format_seconds(launch.total_s),
        percent(launch.total_s / device_s),
        launch.bound_by,
        launch.coverage.value,
    ]


def work_row(launch: ExplainedLaunch) -> list[str]:
    """Return an operator's work, under `WORK_HEADS`."""
    return [
        launch.name,
        launch.op.text,
        format_si(launch.flops / launch.count, "").rstrip() if launch.flops else "",
        percent(launch.flops_fraction) if launch.flops else "",
        format_bytes(launch.num_bytes / launch.count),
        percent(launch.bandwidth_fraction),
    ]


def _host(step: Explanation) -> str:
    beside = "beside the device's" if step.host_overlaps else "before the device's"
    parts = [f"{format_seconds(step.host_s)}, {beside}", f"{format_seconds(step.unhidden_s)} after it"]
    if step.launch_s:
        parts.append(f"{format_seconds(step.launch_s)} to launch what no graph covers")
    return "; ".join(parts)


def totals_rows(step: Explanation) -> list[tuple[str, str]]:
    """Return the totals of a step: time, host, work, memory, KV cache."""
    memory, setup = step.memory, step.setup
    flops, num_bytes = sum(launch.flops for launch in step.launches), _memory_bytes(step)
    num_operators = sum(launch.count for launch in step.launches)
    rows = {
        "step": f"{format_seconds(step.step_s)}, as the simulator takes it; {_rate(step)}",
        "device": f"{format_seconds(step.device_s)} in {num_operators:,.0f} operators",
        "host": _host(step),
        "work": (
            f"{format_si(flops, 'FLOP')} ({format_si(flops / step.device_s, 'FLOP/s')}), "
            f"{format_bytes(num_bytes)} of memory ({format_si(num_bytes / step.device_s, 'B/s')}) on each device"
        ),
        "memory": (
            f"{format_bytes(memory.weight_bytes)} weights, {format_bytes(memory.activation_bytes)} activations, "
            f"{format_bytes(memory.reserved_bytes)} reserve, {format_bytes(memory.kv_cache_bytes)} KV cache "
            f"of {format_bytes(memory.device_bytes)} on each device"
        ),
        "KV cache": (
            f"{memory.kv_tokens:,} tokens of {format_bytes(memory.kv_bytes_per_token)}; "
            f"blocks of {memory.block_size}; max_num_seqs {setup.engine.max_num_seqs:,}"
        ),
    }
    return list(rows.items())


def _memory_bytes(step: Explanation) -> float:
    return sum(launch.num_bytes for launch in step.launches if not isinstance(launch.op, ops.Collective))


def _rate(step: Explanation) -> str:
    tokens = step.batch.num_tokens * step.setup.parallelism.attention_dp
    return f"{number(tokens / step.step_s)} tokens/s"
