"""Fit a step's time to measured steps, as a sum of few terms, for engines that were recorded and not profiled."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from windtunnel.serving.state.records import StepCost

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepModel:
    """Coefficients of a step's seconds.

    seconds = step + prefill_token x prompt tokens + decode_request x decoding requests + decode_context x their keys
    + prefill_pair x query-key pairs.
    """

    step_s: float
    prefill_token_s: float
    decode_request_s: float
    decode_context_s: float
    prefill_pair_s: float


def fit_step_model(
    decode_requests: ArrayLike,
    decode_context_tokens: ArrayLike,
    prefill_tokens: ArrayLike,
    prefill_pairs: ArrayLike,
    duration_s: ArrayLike,
) -> StepModel:
    """Fit by non-negative least squares on relative errors, so that short steps count as much as long ones.

    Args: `[k]` arrays of what each measured step held (contexts and pairs as in `serving.state.records.StepCost`) and
    its seconds.
    """
    from scipy.optimize import nnls

    seconds = np.asarray(duration_s, np.float64)
    terms = [np.ones(seconds.size), prefill_tokens, decode_requests, decode_context_tokens, prefill_pairs]
    features = np.stack([np.asarray(term, np.float64) for term in terms], axis=1)
    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    weights, _ = nnls(features / scale / seconds[:, None], np.ones(seconds.size))
    step_s, token_s, request_s, context_s, pair_s = weights / scale
    return StepModel(step_s, token_s, request_s, context_s, pair_s)


def lower_step_model(model: StepModel, max_num_seqs: int, max_num_batched_tokens: int) -> StepCost:
    """Return the model as look-up arrays; exact, since all of its terms are linear."""
    requests = np.arange(max_num_seqs + 1, dtype=np.float64)
    tokens = np.arange(max_num_batched_tokens + max_num_seqs + 1, dtype=np.float64)
    ends = np.array([0.0, 1.0])
    # A decoding request's keys enter as mean context x requests, a chunk's pairs as tokens x effective length / 2.
    decode_attention_s = requests[:, None] * (model.decode_context_s * ends[None, :])
    decode_attention_s += requests[:, None] * (model.decode_request_s - model.prefill_token_s)
    return StepCost(
        decode_token_s=model.step_s + model.prefill_token_s * requests,
        mixed_token_s=model.step_s + model.prefill_token_s * tokens,
        sample_s=np.zeros(max_num_seqs + 1),
        context_nodes=ends,
        decode_attention_s=decode_attention_s,
        chunk_nodes=ends,
        length_nodes=ends,
        prefill_attention_s=ends[:, None] * ends[None, :] * (model.prefill_pair_s / 2),
        host_step_s=0.0,
        host_request_s=0.0,
        host_overlaps=0,
        recorded_step_s=np.zeros(0),
    )
