"""Inputs of the linear kernels' tests on a GPU."""

import functools

import torch


def random_weight(out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 codes and block scales over 14 binades, the largest and the smallest among them."""
    draw = torch.Generator("cuda").manual_seed(out + width)
    make = functools.partial(torch.randint, generator=draw, device="cuda")
    weight = make(0, 256, (out, width // 2), dtype=torch.uint8)
    scale = torch.exp2(torch.rand(out, width // 16, generator=draw, device="cuda") * 14 - 7)
    scale[0, 0], scale[-1, -1] = 448.0, 2.0**-9
    return weight, scale.to(torch.float8_e4m3fn)


def inputs(tokens: int, width: int) -> torch.Tensor:
    """Rows of a wider matrix whose other columns are NaN."""
    x = torch.full((tokens, width + 24), float("nan"), device="cuda", dtype=torch.bfloat16)
    x[:, :width] = torch.randn(tokens, width, device="cuda")
    return x[:, :width]
