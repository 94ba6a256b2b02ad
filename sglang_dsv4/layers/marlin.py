"""NVFP4 on sm_80 and later through Marlin: 4-bit weights, bfloat16 activations (W4A16).

Marlin (SGLang's, compiled just in time) reads weights in its own order, tile by tile, widens them
in registers and multiplies on the bfloat16 units. e2m1 * e4m3 is exact in bfloat16, so only
``weight_scale_2`` (to bfloat16, by 2^-9 at most) and the result are rounded. ``input_scale`` is not
used.

A linear layer may have any shape: SGLang pads [out, in] with zeros to ``linear_padding``. Experts
need out % 128 == 0 and in % 64 == 0; their width is padded with zeros (silu(0) * 0 = 0), the hidden
size of every DeepSeek-V4 fits.
"""

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.marlin import MarlinMoeQuantInfo
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4A16LinearMethod

from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.nvfp4_linear import Nvfp4LinearMethod, replace_parameters
from sglang_dsv4.layers.nvfp4_moe import Nvfp4MoEMethod, pad_experts, share_outer_scale

if TYPE_CHECKING:
    from sglang.srt.layers.moe.token_dispatcher import CombineInput, DispatchOutput

logger = logging.getLogger(__name__)

EXPERT_OUT, EXPERT_IN = 128, 64
"""What the shape of an expert's matrix must be a multiple of (Marlin's smallest tiles)."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not less than ``value``."""
    return -(-value // multiple) * multiple


def linear_padding(out: int, width: int) -> tuple[int, int]:
    """(out, in) that SGLang pads a linear layer to: 64 x 128 or 128 x 64 tiles, the fewer values.

    A padded ``out`` costs rows of zeros and a copy of the result, a padded ``in`` a copy of the
    activations in every call.
    """
    shapes = (
        (round_up(out, 64), round_up(width, 128)),
        (round_up(out, 128), round_up(width, 64)),
    )
    return min(shapes, key=lambda shape: (shape[0] * shape[1], sum(shape)))


class MarlinLinearMethod(Nvfp4LinearMethod):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = ModelOptNvFp4A16LinearMethod(self.quant_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weight, and say where the shape makes every call copy its activations."""
        out, width = layer.output_size_per_partition, layer.input_size_per_partition
        if linear_padding(out, width)[1] != width:
            logger.warning(
                "An NVFP4 layer of %d inputs is padded to %d: every call copies its activations. "
                "A smaller --tp-size may avoid it.",
                width,
                linear_padding(out, width)[1],
            )
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x bfloat16 [T, in] -> [T, out]."""
        return self.kernel.apply(layer, x, bias)


class MarlinExperts(NamedTuple):
    """Matrices of E experts in Marlin's order.

    ``weight`` int32 [E, in / 16, 2 out]; ``scale`` e4m3-sized bytes [E, in / 16, out] that hold
    scale * 2^7 without its sign; ``scale_2`` bfloat16 [E], times 2^119.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    scale_2: torch.Tensor


def pack_experts(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> MarlinExperts:
    """Repack experts, one at a time so that no second copy of all is needed beside the result.

    Args:
        weight: uint8 [E, out, in / 2] as ModelOpt packs it.
        scale: e4m3 [E, out, in / 16].
        scale_2: float32 [E].

    Raises:
        UnsupportedError: the shape is no multiple of Marlin's tiles.
    """
    experts, out, width = weight.shape[0], weight.shape[1], weight.shape[2] * 2
    if out % EXPERT_OUT or width % EXPERT_IN:
        raise UnsupportedError(
            f"A matrix of NVFP4 experts is [{out}, {width}], wanted multiples of "
            f"[{EXPERT_OUT}, {EXPERT_IN}]: use a smaller --tp-size, or "
            f"SGLANG_DSV4_NVFP4_WEIGHT_KERNEL=dequant."
        )
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack

    device = weight.device
    no_order = torch.empty(0, dtype=torch.int, device=device)
    packed = torch.empty((experts, width // 16, out * 2), dtype=torch.int32, device=device)
    scales = torch.empty((experts, width // 16, out), dtype=scale.dtype, device=device)
    for expert in range(experts):
        columns = weight[expert].contiguous().view(torch.int32).T.contiguous()
        packed[expert] = gptq_marlin_repack(columns, no_order, width, out, 4)
        rows = scale[expert].T.contiguous().to(torch.bfloat16)
        rows = marlin_utils.marlin_permute_scales(rows, width, out, 16)
        scales[expert] = marlin_utils_fp4.nvfp4_marlin_process_scales(rows)
    outer = marlin_utils_fp4.nvfp4_marlin_process_global_scale(scale_2.to(torch.bfloat16))
    return MarlinExperts(packed, scales, outer)


class MarlinMoEMethod(Nvfp4MoEMethod):
    """Routed experts: SGLang's two Marlin products with the clamped SwiGLU between them."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """SGLang's Marlin runner; it takes the clamp from ``swiglu_limit``."""
        self.runner = MoeRunner(MoeRunnerBackend.MARLIN, moe_runner_config)
        self.clamp = moe_runner_config.swiglu_limit

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pad, repack, and drop the checkpoint's layout.

        Raises:
            UnsupportedError: the hidden size is no multiple of Marlin's tiles.
        """
        scale, outer = share_outer_scale(layer.w13_weight_scale.data, layer.w13_weight_scale_2.data)
        layer.w13_weight_scale.data = scale
        pad_experts(layer, EXPERT_IN)
        for name, scale_2 in (("w13", outer), ("w2", layer.w2_weight_scale_2.data)):
            packed = pack_experts(
                getattr(layer, f"{name}_weight").data,
                getattr(layer, f"{name}_weight_scale").data,
                scale_2,
            )
            weight, scale, outer_scale = packed
            replace_parameters(
                layer, f"{name}_", weight=weight, weight_scale=scale, weight_scale_2=outer_scale
            )
        layer.workspace = marlin_utils.marlin_make_workspace(
            layer.w13_weight.device, max_blocks_per_sm=4
        )

    def apply(self, layer: Any, dispatch_output: "DispatchOutput") -> "CombineInput":
        """The chosen experts, weighted after the down projection: their sum [T, D], or [T, k, D].

        Without expert parallelism the sum is left to the caller, who adds the shared expert in the
        same launch, and the workspace is the layer's own instead of one cleared in every call.
        """
        expert_map = getattr(layer.dispatcher, "local_expert_mapping", None)
        if expert_map is None:
            return self._apart(layer, dispatch_output)
        info = MarlinMoeQuantInfo(
            w13_qweight=layer.w13_weight,
            w2_qweight=layer.w2_weight,
            w13_scales=layer.w13_weight_scale,
            w2_scales=layer.w2_weight_scale,
            w13_g_idx_sort_indices=None,
            w2_g_idx_sort_indices=None,
            weight_bits=4,
            w13_global_scale=layer.w13_weight_scale_2,
            w2_global_scale=layer.w2_weight_scale_2,
            expert_map=expert_map,
            global_num_experts=layer.num_experts,
        )
        return self.runner.run(dispatch_output, info)

    def _apart(self, layer: Any, dispatch_output: "DispatchOutput") -> "CombineInput":
        from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        topk, hidden = dispatch_output.topk_output, dispatch_output.hidden_states
        out = fused_marlin_moe(
            hidden_states=hidden,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=topk.router_logits,
            topk_weights=topk.topk_weights,
            topk_ids=topk.topk_ids,
            w1_global_scale=layer.w13_weight_scale_2,
            w2_global_scale=layer.w2_weight_scale_2,
            workspace=layer.workspace,
            num_bits=4,
            clamp_limit=self.clamp,
            no_combine=True,
        )
        return StandardCombineInput(hidden_states=out)
