"""Attention kernels that can be measured: torch's own, and those of flash-attn and FlashInfer where installed.

Each takes queries `[batch, new, heads, width]` and caches `[batch, length, kv_heads, width]`, whose last `new` tokens
are the queries' own, and returns `[batch, new, heads, width]`. A token sees what lies before it and itself.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from windtunnel.errors import InputError, check_known

Tensor = Any
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

PACKAGES: Mapping[str, str] = {"sdpa": "torch", "flash_attn": "flash_attn", "flashinfer": "flashinfer"}
"""Backend -> the package that has it."""

WORKSPACE_BYTES = 128 << 20
"""Workspace of FlashInfer, as its documentation advises."""


def check_attention(backend: str, device: str) -> None:
    """Raise InputError where there is no such backend, it is not installed, or it needs a GPU."""
    check_known(backend, PACKAGES, f"there is no attention backend {backend!r}", ", ".join(PACKAGES))
    if backend != "sdpa" and device != "cuda":
        raise InputError(f"{backend} runs on CUDA devices alone", "take --attention sdpa")
    if find_spec(PACKAGES[backend]) is None:
        raise InputError(f"{backend} is not installed", "install it, or take --attention sdpa")


def attention_version(backend: str) -> str:
    """Return the backend with the version of its package, for the provenance."""
    from importlib.metadata import PackageNotFoundError, version

    names = {"sdpa": "torch", "flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}
    try:
        return f"{backend} {version(names[backend])}"
    except PackageNotFoundError:
        return backend


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Run torch's scaled_dot_product_attention, whichever kernel it takes."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    new, length = query.shape[1], keys.shape[1]
    output = scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=causal_lower_right(new, length) if 1 < new < length else None,
        is_causal=new == length and new > 1,
        enable_gqa=query.shape[2] != keys.shape[2],
    )
    return output.transpose(1, 2)


def plan_flash_attention(batch: int, length: int, device: str) -> Attend:
    """Prepare flash-attn for a batch whose requests have `length` keys each.

    Prompts run `flash_attn_func`; decoding runs `flash_attn_with_kvcache`, which splits the keys. The causal mask ends
    at the lower right, since flash-attn 2.1.
    """
    import torch

    # An engine has the lengths on the device before the forward.
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        from flash_attn import flash_attn_func, flash_attn_with_kvcache

        if query.shape[1] > 1:
            return flash_attn_func(query, keys, values, causal=True)
        return flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, causal=True)

    return attend


def flashinfer_prefill(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Run FlashInfer's kernel of one prompt."""
    import flashinfer

    return flashinfer.single_prefill_with_kv_cache(query[0], keys[0], values[0], causal=True).unsqueeze(0)


def plan_flashinfer(batch: int, length: int, heads: int, kv_heads: int, width: int, dtype: Any) -> Attend:
    """Prepare FlashInfer to decode requests that have `length` keys each, in a cache whose pages hold one token.

    Its plan is computed on the host once for a shape, as engines do it outside the forward. `heads`, `kv_heads` and
    `width` are those of the layer, `dtype` is of queries and cache.
    """
    import flashinfer
    import torch

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=heads // kv_heads >= 4)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    pages = torch.arange(batch * length, dtype=torch.int32, device="cuda")
    full = torch.ones(batch, dtype=torch.int32, device="cuda")
    wrapper.plan(starts, pages, full, heads, kv_heads, width, 1, q_data_type=dtype, kv_data_type=dtype)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        paged = tuple(cache.reshape(-1, 1, *cache.shape[2:]) for cache in (keys, values))
        return wrapper.run(query[:, 0], paged).unsqueeze(1)

    return attend
