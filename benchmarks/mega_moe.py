"""DeepGEMM's Mega MoE, one kernel for dispatch, experts and combine: published times beside ours.

    python benchmarks/mega_moe.py

Eight ranks on one NVLink domain, experts in mxfp4, random scores. The times are those of deepseek-ai/DeepGEMM, pull
request 316 (of B200 or B300, it does not say which), and of vllm-project/vllm, pull request 49636 (`dg`). Nothing is
fitted to them but two shares of peak rates in the closed form (`pricing/exchange.py`), from two rows of
DeepSeek-V4-Pro.
"""

import numpy as np

from windtunnel import catalog
from windtunnel.model.feed_forward.experts import MegaMoe
from windtunnel.model.precision import Format
from windtunnel.pricing.aiconfigurator.collection import TEXT, KernelChoices
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.roofline import Roofline

RANKS = 8
PUBLISHED_US: dict[tuple[str, int, int, int, int], dict[int, float]] = {
    ("DeepGEMM, V4-Flash", 4096, 2048, 256, 6): {1: 56.5, 512: 146.5, 8192: 1283.1, 32768: 4855.5},
    ("DeepGEMM, V4-Pro", 7168, 3072, 384, 6): {1: 108.1, 512: 369.6, 8192: 2818.5, 32768: 10655.2},
    ("vLLM, V4-Pro", 7168, 3072, 384, 6): {
        8: 260.1,
        64: 327.7,
        512: 376.9,
        1024: 492.1,
        2048: 899.1,
        4096: 1591.8,
        8192: 3144.2,
    },
    ("vLLM, V3", 7168, 2048, 256, 8): {8: 170.8, 64: 184.4, 512: 282.6, 1024: 465.0, 2048: 809.4},
}
"""Name, hidden size, width of an expert, experts, experts a token -> tokens of a rank -> microseconds."""
DEVICES = ("gb300", "gb200", "b200_sxm", "b300_sxm")


def main() -> None:
    print(f"{'published':20s}{'device':10s}{'found':14s}   ours over published, by tokens of a rank")
    errors: dict[str, list[float]] = {}
    for (name, hidden, width, experts, chosen), published in PUBLISHED_US.items():
        tokens, took = np.array(list(published)), np.array(list(published.values())) * 1e-6
        op = MegaMoe(tokens * float(RANKS), hidden, width, experts, chosen, 1, RANKS, Format.MXFP4, True, RANKS)
        for name_of_device in DEVICES:
            device = catalog.device(name_of_device)
            node = catalog.default_node(device)
            kernels = KernelChoices(expert_distribution=TEXT)
            estimate = measured_estimator(device, node, "sglang", "0.5.16", kernels=kernels).estimate(op)
            found = {name_of_device: (str(estimate.coverage), estimate.seconds)}
            if name_of_device == DEVICES[0]:
                found["roofline"] = ("roofline", Roofline(device, node).seconds(op))
            for of, (coverage, seconds) in found.items():
                ratios = np.asarray(seconds) / took
                errors.setdefault(of, []).extend(np.abs(ratios - 1.0).tolist())
                cells = ", ".join(f"{count}: {ratio:.2f}" for count, ratio in zip(tokens, ratios, strict=True))
                print(f"{name:20s}{of:10s}{coverage:14s}   {cells}")
    for of, found_errors in errors.items():
        print(f"{of}: median error {np.median(found_errors):.0%} of {len(found_errors)} rows, none refused")


if __name__ == "__main__":
    main()
