import numpy as np
import pytest

from oracles.serving.cost import Prices
from step_model import StepModel, fit_step_model, lower_step_model

MODEL = StepModel(step_s=5e-3, prefill_token_s=4e-5, decode_request_s=2e-4, decode_context_s=3e-7, prefill_pair_s=2e-8)


def batches(rng: np.random.Generator, n: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    decodes = rng.integers(0, 32, n)
    context = decodes * rng.integers(1, 2000, n)
    tokens = rng.integers(0, 2, n) * rng.integers(1, 512, n)
    return decodes, context, tokens, tokens * rng.uniform(0, 1000, n)


def seconds(decodes: np.ndarray, context: np.ndarray, tokens: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    m = MODEL
    linear = m.step_s + m.prefill_token_s * tokens + m.decode_request_s * decodes
    return linear + m.decode_context_s * context + m.prefill_pair_s * pairs


def test_a_fit_finds_the_line_that_made_the_steps() -> None:
    held = batches(np.random.default_rng(0))
    found = fit_step_model(*held, seconds(*held))
    assert vars(found) == pytest.approx(vars(MODEL), rel=1e-6)


def test_a_fit_is_never_negative_and_forgives_noise() -> None:
    rng = np.random.default_rng(1)
    held = batches(rng)
    found = fit_step_model(*held, seconds(*held) * rng.lognormal(0, 0.05, 200))
    assert min(vars(found).values()) >= 0
    assert found.step_s == pytest.approx(MODEL.step_s, rel=0.1)


def test_a_term_that_never_occurs_costs_nothing() -> None:
    decodes, context, tokens, _ = batches(np.random.default_rng(2))
    nothing = np.zeros(200)
    found = fit_step_model(decodes, context, tokens, nothing, seconds(decodes, context, tokens, nothing))
    assert found.prefill_pair_s == 0


def test_the_arrays_say_exactly_what_the_line_says() -> None:
    cost = lower_step_model(MODEL, 32, 512)
    plain = Prices(cost)
    for decodes, context, tokens, pairs in zip(*batches(np.random.default_rng(3)), strict=True):
        attention_s = plain.decode_attention_s(decodes, context) + plain.prefill_attention_s(tokens, pairs)
        found = cost.mixed_token_s[decodes + tokens] + cost.sample_s[decodes] + attention_s
        assert found == pytest.approx(float(seconds(decodes, context, tokens, pairs)))
        if not tokens:
            assert cost.decode_token_s[decodes] + attention_s == pytest.approx(found)
