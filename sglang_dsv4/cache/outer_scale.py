"""One power of two a layer that keeps NVFP4 block scales out of the e4m3 subnormals.

A record has no outer scale: its block scales are ``amax / 6`` in e4m3, whose normal numbers end at
2**-6. A latent of small amplitude would fall below and lose precision. Latents leave an RMSNorm, so
their amplitude is the norm's weight, known at load: multiplied by a power of two it is exact, and
attention undoes it (K and V are the same record): softmax scale / s, output / s.
"""

import math

import torch

from sglang_dsv4.cache.kv_layout import KVFormat

_E4M3_MAX = 448.0
_E4M3_MIN_NORMAL = 2.0**-6
_E2M1_MAX = 6.0
_GROUP = 16
_MARGIN = 4.0
"""A group whose latents are this much smaller than usual still has a normal block scale."""


def outer_scale(
    norm_weights: list[torch.Tensor], kv_format: KVFormat, nope_dim: int = 448
) -> float:
    """The factor s of a layer, 1.0 whenever the plain records lose nothing.

    Args:
        norm_weights: [512] weights of the RMSNorms whose outputs share the layer's softmax:
            ``kv_norm`` and, in CSA and HCA layers, ``compressor.kv_norm``.
        kv_format: only NVFP4 records need it.
        nope_dim: leading dimensions that are stored in 4 bits.

    The smallest group's root mean square must stay ``_MARGIN`` times above the amplitude at which
    its block scale turns subnormal; the largest value an RMSNorm can give, ``|w| * sqrt(512)``,
    must not exceed the largest block, 6 * 448. The second bound wins.
    """
    if kv_format is not KVFormat.NVFP4:
        return 1.0
    weights = torch.stack([w.detach().float().cpu()[:nope_dim] for w in norm_weights])
    width = norm_weights[0].numel()
    smallest = weights.unflatten(-1, (-1, _GROUP)).square().mean(-1).sqrt().min().item()
    largest = weights.abs().max().item() * math.sqrt(width)
    if smallest == 0.0 or largest == 0.0:
        return 1.0
    wanted = _E4M3_MIN_NORMAL * _E2M1_MAX * _MARGIN / smallest
    allowed = _E4M3_MAX * _E2M1_MAX / largest
    exponent = min(max(0, math.ceil(math.log2(wanted))), math.floor(math.log2(allowed)))
    return 2.0**exponent
