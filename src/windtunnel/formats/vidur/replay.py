"""Run the configuration in a Vidur `config.json` on Vidur's look-up tables, with Vidur's results."""

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError, check_known
from windtunnel.formats.vidur import read
from windtunnel.serving import codes
from windtunnel.serving.run import LoopRun, prepare_loop
from windtunnel.serving.state import records as state
from windtunnel.serving.state.per_request import StageTables
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.generate.requests import RequestArrays

SCHEDULERS = {
    "vllm": codes.VLLM_V0,
    "sarathi": codes.SARATHI,
    "orca": codes.ORCA,
    "faster_transformer": codes.FASTER_TRANSFORMER,
    "lightllm": codes.LIGHTLLM,
}
ROUTERS = {"round_robin": codes.ROUND_ROBIN, "lor": codes.LEAST_WAITING, "random": codes.ASSIGNED}


def replay(
    config: read.VidurConfig,
    tables: read.OperatorTables,
    requests: RequestArrays,
    *,
    replicates_bugs: bool = True,
    fuses_steps: bool = True,
    keeps_trail: bool = False,
) -> LoopRun:
    """Simulate `requests` under the scheduler, cluster and memory plan of `config`. InputError for an unknown scheduler
    or router, or a batch outside the tables.

    Args:
        config, tables, requests: as `windtunnel.formats.vidur.read` reads them.
        replicates_bugs: as Vidur does, run the rest of a prompt that was restarted in its middle one token a step, and
            lose the blocks of FasterTransformer requests that end before their batch.
        fuses_steps: take equal decode steps at once; changes the step table, not the times.
        keeps_trail: also return the contents of every batch.
    """
    plan = pool_plan(config, replicates_bugs, fuses_steps)
    is_random = plan.settings.router == codes.ASSIGNED
    replicas = read.random_replicas(config, requests.num_requests) if is_random else None
    loop = prepare_loop([plan], requests, stage_tables=stage_tables(config, tables), replicas=replicas)
    return loop.run(keeps_trail=keeps_trail)


def pool_plan(config: read.VidurConfig, replicates_bugs: bool, fuses_steps: bool) -> PoolPlan:
    """Return the cluster of `config` as the loop takes it; look-up tables price its steps. InputError for an unknown
    scheduler or router, or nothing fits in memory."""
    check_known(config.scheduler, SCHEDULERS, f"Vidur has no replica scheduler {config.scheduler!r}")
    check_known(config.router, ROUTERS, f"Vidur has no global scheduler {config.router!r}")
    memory, stages = read.plan_memory(config), config.num_pipeline_stages
    code = SCHEDULERS[config.scheduler]
    reserves = code in (codes.ORCA, codes.FASTER_TRANSFORMER)
    settings = state.KernelSettings(
        scheduler=code,
        num_replicas=config.num_replicas,
        ranks_per_replica=1,
        num_stages=stages,
        max_num_seqs=config.batch_size_cap,
        max_num_batched_tokens=config.chunk_size if code == codes.SARATHI else config.max_tokens_in_batch,
        block_size=config.block_size,
        num_blocks=memory.num_blocks,
        router=ROUTERS[config.router],
        max_batch_seqs=memory.max_batch_size if reserves else config.batch_size_cap // stages,
        watermark_blocks=int(config.watermark_blocks_fraction * memory.num_blocks),
        reserved_blocks=memory.blocks_per_request if reserves else 0,
        max_waiting_steps=config.max_waiting_iters,
        loses_prompts=int(replicates_bugs),
        leaks_blocks=int(replicates_bugs),
        fuses_steps=int(fuses_steps),
        end_s=float(config.time_limit or np.inf),
    )
    return PoolPlan(settings, state.NO_COST)


def stage_tables(config: read.VidurConfig, tables: read.OperatorTables) -> StageTables:
    """Sum a layer's operators to a pipeline stage, by Vidur's formula (`ExecutionTime.total_time`).

    stage = layers / stages x (attention + MLP + add) + send_recv + host, with two all-reduces a layer, each with a
    launch overhead on the host and a skew that grows with tp^1.25. InputError where tensor or pipeline parallelism
    needs a table that is missing.
    """
    tp, pp = config.tensor_parallel_size, config.num_pipeline_stages
    layers = config.num_layers / pp
    for degree, name in ((tp, "all_reduce"), (pp, "send_recv")):
        if degree > 1 and name not in tables.token_s:
            raise InputError(f"the look-up tables have no {name}, which tp {tp} and pp {pp} need")
    layer_s = _sum([tables.token_s[name] for name in read.TOKEN_OPERATORS if name in tables.token_s])
    if tp > 1:
        skew_ms = config.nccl_cpu_skew_overhead_per_device_ms * tp**1.25
        launch_s = 1e-3 * (config.nccl_cpu_launch_overhead_ms + skew_ms)
        layer_s = _sum([layer_s, 2 * (tables.token_s["all_reduce"] + launch_s)])
    grouped = config.num_q_heads > config.num_kv_heads
    send_recv_s = tables.token_s["send_recv"] if pp > 1 else np.zeros(layer_s.size)
    return StageTables(
        token_s=layers * layer_s[: send_recv_s.size],
        kv_save_s=layers * tables.token_s["attn_kv_cache_save"],
        prefill_s=layers * tables.prefill_s,
        decode_s=layers * tables.decode_s,
        send_recv_s=send_recv_s,
        host_s=np.zeros(0) if config.skip_cpu_overhead_modeling else _host_step_s(tables),
        granularity=config.kv_cache_prediction_granularity,
        prefill_factor=1 + config.attention_prefill_batching_overhead_fraction if grouped else 1.0,
        decode_factor=1 + config.attention_decode_batching_overhead_fraction if grouped else 1.0,
    )


def host_s(run: LoopRun, config: read.VidurConfig, tables: read.OperatorTables) -> Floats:
    """Return the host's share of each request's time in pipeline stages, [requests]; the run must keep its trail."""
    assert run.trail is not None
    rows, request = run.trail.members[:, 0], run.trail.members[:, 1]
    step_s = _host_step_s(tables)[np.bincount(rows)] * config.num_pipeline_stages
    return np.asarray(np.bincount(request, step_s[rows], minlength=len(run.requests)), np.float64)


def _host_step_s(tables: read.OperatorTables) -> Floats:
    """Return the host's share of a step in one stage, by the size of the batch."""
    missing = [name for name in read.HOST_OPERATORS if name not in tables.host_s]
    if missing:
        raise InputError(f"the look-up tables have no {missing[0]}, but the run models CPU overheads")
    return _sum([tables.host_s[name] for name in read.HOST_OPERATORS])


def _sum(arrays: list[Floats]) -> Floats:
    shortest = min(len(array) for array in arrays)
    return np.asarray(np.sum([array[:shortest] for array in arrays], axis=0))
