"""Values of the scales: which are errors, which are only reported, and one outer scale for fusions.

An NVFP4 weight is e2m1 * weight_scale (e4m3, one for 16 columns) * weight_scale_2 (float32).
"""

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dsv4.checkpoint.reader import first_few
from sglang_dsv4.errors import CheckpointError

logger = logging.getLogger(__name__)

NVFP4Part = tuple[Tensor, Tensor, Tensor]
"""(weight uint8 [out, in/2], weight_scale e4m3 [out, in/16], weight_scale_2 float32 scalar)."""

_rescalings = itertools.count()
_NAN_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}


def check_weight_scale(name: str, scale: Tensor) -> None:
    """Check a weight scale (e4m3, e8m0 or float) of any shape.

    Raises `CheckpointError` if it holds NaN, infinity or, in floating point, a negative value.
    """
    nan_code = _NAN_CODES.get(scale.dtype)
    if nan_code is None:
        bad = int((~torch.isfinite(scale) | (scale < 0)).sum())
    else:
        codes = scale.view(torch.uint8)
        bad = int(((codes & nan_code) == nan_code).sum())
    if bad:
        raise CheckpointError(
            f"{name} has {bad} of {scale.numel()} values that are NaN, infinite or negative, "
            "finite scales were wanted; export the checkpoint again."
        )


class InputScaleReport:
    """Counts the activation scales that cannot be used; these are no error.

    ModelOpt writes none for weight-only exports, and NaN or zero for experts that no calibration
    token reached. Such a module computes its activation scale at run time.
    """

    def __init__(self) -> None:
        self._unusable: list[str] = []
        self._seen = 0

    def usable(self, module: str, scale: Tensor | None) -> bool:
        """Whether a module's `input_scale` (float, None if absent) is usable; counts it if not."""
        self._seen += 1
        good = scale is not None and bool(torch.isfinite(scale).all() & (scale > 0).all())
        if not good:
            self._unusable.append(module)
        return good

    def finish(self) -> str | None:
        """Log and return one warning with the count, or None if every scale was usable."""
        if not self._unusable:
            return None
        warning = (
            f"{len(self._unusable)} of {self._seen} modules have no usable input_scale "
            f"({first_few(self._unusable)}): absent, zero or not finite; their activations are "
            "scaled at run time."
        )
        logger.warning(warning)
        return warning


def reconcile_outer_scales(parts: Sequence[NVFP4Part], name: str = "") -> list[NVFP4Part]:
    """Give matrices that will be stacked along the output one common `weight_scale_2`.

    Equal outer scales come back unchanged. Otherwise all take the largest one and the other parts'
    block scales are multiplied by their own outer scale over the largest (<= 1, so none saturates)
    and rounded to e4m3 again: up to 1/16 relative error for a normal e4m3 value, and more where it
    falls below 2^-6, unless the ratio is a power of two. The first such case is logged with `name`.
    Raises `CheckpointError` if an outer scale is not finite and >= 0.
    """
    outer = [float(scale_2) for _, _, scale_2 in parts]
    if not all(0 <= value < float("inf") for value in outer):
        raise CheckpointError(
            f"weight_scale_2 of {name or 'a fused module'} is {outer}, finite values >= 0 were "
            "wanted; export the checkpoint again."
        )
    if len(set(outer)) <= 1:
        return list(parts)
    largest = max(outer)
    if next(_rescalings) == 0:
        logger.warning(
            "%s is stored with unequal weight_scale_2 (%s): block scales are rounded again to "
            "share the largest, which loses accuracy; later cases are not logged.",
            name or "A fused module",
            ", ".join(f"{value:g}" for value in outer),
        )
    common = parts[outer.index(largest)][2]
    return [
        (weight, _rescale(scale, value / largest), common.clone())
        for (weight, scale, _), value in zip(parts, outer, strict=True)
    ]


def _rescale(scale: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return scale
    return (scale.to(torch.float32) * factor).to(torch.float8_e4m3fn)
