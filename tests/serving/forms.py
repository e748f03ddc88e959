"""The serving loop compiled in few forms, for tests of random cases."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numba import config

from windtunnel.serving import run
from windtunnel.serving.setup.prefix_cache import KvRetention, caches_of, session_state
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import NO_SPECULATION, PoolPlan
from windtunnel.workload.generate.requests import RequestArrays


def prepare_loop(
    plans: Sequence[PoolPlan], requests: RequestArrays, caches: Sequence[state.Cache] = (), *rest: Any, **named: Any
) -> run.Loop:
    """Do what `serving.run.prepare_loop` does, with the code of every feature in the loop where it is compiled.

    Random cases would otherwise compile two dozen forms of the loop, 5 to 20 s each, for the features that one of their
    pools uses. A feature that a case does not use gets tables in which nothing happens: caches that hold no block,
    sessions of nobody, no images, a draft of no token. What a form leaves out is tested where nothing is compiled
    (`make test-nojit` runs the same cases with just those features that they use), and its compilation by the tests
    that simulate scenarios.
    """
    if config.DISABLE_JIT:
        return run.prepare_loop(plans, requests, caches, *rest, **named)
    if not caches:
        caches = [caches_of(plan.settings, KvRetention(False), requests) for plan in plans]
    loop = run.prepare_loop(plans, requests, caches, *rest, **named)
    pool, tables = loop.pool, loop.run_tables
    pool = pool._replace(windows=1, batched=1, vllm_v1=1, sglang=1, balance=1)
    if pool.speculation is None:
        pool = pool._replace(speculation=NO_SPECULATION)
    if tables.media is None:
        num_replicas = sum(plan.settings.num_replicas for plan in plans)
        nothing = np.zeros((requests.arrival_s.size, 0, 3), np.int64)
        tables = tables._replace(media=run.media_of(replace(requests, media=nothing), num_replicas))
    if pool.encoder is None:
        pool = pool._replace(encoder=run.encoder_caches(plans, tables.media, requests.media_tokens))
    if tables.sessions is None:
        nobody = np.full(requests.arrival_s.size, state.NONE)
        tables = tables._replace(sessions=session_state(replace(requests, previous=nobody)))
    if len(plans) > 1:
        if pool.sequences is None:
            pool = run._with_sequences(pool, plans, tables.requests)
        if tables.waiting is None:
            waiting, pairs = np.zeros(requests.arrival_s.size, np.int64), np.zeros((0, 2), np.int64)
            tables = tables._replace(waiting=waiting, pairs=pairs)
    loop.pool, loop.run_tables = pool, tables
    return loop
