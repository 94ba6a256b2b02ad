"""Microseconds of NVFP4 layers on the GPU from cold L2, one call in a CUDA graph, beside bfloat16.

    python bench_weights.py [flash] [pro] [--fp8]     (both when none is named)

``SGLANG_DSV4_NVFP4_WEIGHT_KERNEL`` chooses another kernel than the device's. Linear layers and the
routed experts in published shapes with random weights; no server is started.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import weight_cases as cases
from timing import graph_time

TIMED = (1, 16, 64, 256, 4096)


def both(ours: Callable, rival: Callable) -> str:
    """The two times side by side."""
    return f"{graph_time([ours], 8):6.1f} | {graph_time([rival], 8):6.1f}"


def measure(name: str, fp8: bool) -> None:
    """One call, 4 bits | bfloat16, at several T."""
    model = cases.MODELS[name]
    print(f"{name}: microseconds, 4 bits | bf16, T {TIMED}")
    for part, (out, width) in model.linear.items():
        layer, weight = cases.random_linear(out, width, fp8)
        plain = weight.bfloat16()
        row = [
            both(
                functools.partial(layer, x), functools.partial(torch.nn.functional.linear, x, plain)
            )
            for x in (cases.inputs(count, width) for count in TIMED)
        ]
        print(f"  {part:20s} [{out}, {width}]".ljust(40) + "   ".join(row))
    inner = model.inner // model.expert_ranks
    packed, _ = cases.random_experts(model.experts, model.hidden, inner, fp8=fp8)
    wide, _ = cases.random_experts(model.experts, model.hidden, inner, nvfp4=False)
    row = []
    for count in TIMED:
        x, topk = cases.inputs(count, model.hidden), cases.random_topk(count, model.experts)
        row.append(both(functools.partial(packed, x, topk), functools.partial(wide, x, topk)))
    print(f"  experts {model.experts} of inner {inner}, top-6".ljust(40) + "   ".join(row))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*cases.MODELS, []])
    parser.add_argument("--fp8", action="store_true", help="large batches in FP8")
    options = parser.parse_args()
    cases.start(cases.MODEL, "cuda")
    from sglang_dsv4.layers.weight_kernels import describe, weight_kernels_of

    print(describe(weight_kernels_of(torch.device("cuda"))))
    with torch.no_grad(), torch.device("cuda"):
        for name in options.models or cases.MODELS:
            measure(name, options.fp8)


if __name__ == "__main__":
    main()
