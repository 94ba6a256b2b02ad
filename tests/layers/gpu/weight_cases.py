"""SGLang on one GPU without a server, and layers with random NVFP4 weights."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

BF16 = torch.bfloat16
MODEL = Path(__file__).resolve().parents[3] / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"
FLASH = {
    "q_a_kv_proj": (1536, 4096),
    "q_b_proj": (32768, 1024),
    "q_b_proj/8": (4096, 1024),
    "o_b_proj": (4096, 8192),
    "o_b_proj/8": (4096, 1024),
    "kv_gate_proj csa": (2048, 4096),
    "kv_gate_proj hca": (1024, 4096),
    "indexer.kv_gate_proj": (512, 4096),
    "indexer.q_b_proj": (8192, 1024),
    "weights_proj": (64, 4096),
    "shared.gate_up": (4096, 4096),
    "shared.down": (4096, 2048),
    "shared.down/8": (4096, 256),
}
PRO = {
    "q_a_kv_proj": (2048, 7168),
    "q_b_proj": (65536, 1536),
    "q_b_proj/8": (8192, 1536),
    "o_b_proj": (7168, 16384),
    "o_b_proj/8": (7168, 2048),
    "kv_gate_proj csa": (2048, 7168),
    "kv_gate_proj hca": (1024, 7168),
    "indexer.kv_gate_proj": (512, 7168),
    "indexer.q_b_proj": (8192, 1536),
    "weights_proj": (64, 7168),
    "shared.gate_up": (6144, 7168),
    "shared.down": (7168, 3072),
    "shared.down/8": (7168, 384),
}


class Published(NamedTuple):
    """Shapes of a published model: (out, in) of its linear layers, "/8" those of a rank of eight.

    ``hidden``, ``inner`` and ``experts`` of the MoE; ``expert_ranks`` that share the experts whose
    time is taken, so that bfloat16 ones fit too.
    """

    linear: dict[str, tuple[int, int]]
    hidden: int
    inner: int
    experts: int
    expert_ranks: int


MODELS = {
    "flash": Published(FLASH, 4096, 2048, 256, 1),
    "pro": Published(PRO, 7168, 3072, 384, 8),
}


def start(model: Path, device: str) -> Any:
    """SGLang's configuration and process groups; returns the model's config."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_dsv4 import plugin

    plugin._register()
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_dsv4.layers.weight_kernels import weight_kernels_of

    args = ServerArgs(
        model_path=str(model),
        device=device,
        context_length=4096,
        mem_fraction_static=0.2,
        moe_runner_backend=weight_kernels_of(torch.device(device)).experts_runner or "auto",
        log_level="warning",
    )
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config

    config = ModelConfig.from_server_args(args)
    port = PortArgs.init_new(args).nccl_port
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    initialize_moe_config()
    initialize_fp4_gemm_config()
    return config.hf_config


def stop() -> None:
    """Tear down the process groups."""
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()


def cosine(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    ours, wanted = ours.double().flatten(), wanted.double().flatten()
    return float(ours @ wanted / ours.norm() / wanted.norm())


def inputs(tokens: int, width: int) -> torch.Tensor:
    return torch.randn(tokens, width, dtype=BF16)


def dense_weight(layer: Any) -> torch.Tensor:
    """Float32 value of a linear layer's NVFP4 weight, before it is repacked."""
    from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

    return dequantize_weight(layer.weight, layer.weight_scale, layer.weight_scale_2.max())


def dense_experts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from sglang_dsv4.kernels.reference.nvfp4 import dequantize_weight

    halves = [
        dequantize_weight(w, s, layer.w13_weight_scale_2[:, part])
        for part, (w, s) in enumerate(
            zip(layer.w13_weight.chunk(2, 1), layer.w13_weight_scale.chunk(2, 1), strict=True)
        )
    ]
    down = dequantize_weight(layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2)
    return torch.cat(halves, dim=1), down


def random_linear(
    out: int, width: int, fp8: bool = False, hostile: bool = False
) -> tuple[Any, torch.Tensor]:
    """(layer, its float32 weight) with random NVFP4 weights; values of about 1 / sqrt(width).

    Made under a bfloat16 default dtype, as SGLang makes a model. Args as ``fill``'s, and ``fp8``:
    large batches are multiplied in FP8.
    """
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from sglang_dsv4.checkpoint.quant import QuantKind
    from sglang_dsv4.layers.quant_config import Dsv4QuantConfig

    quant = Dsv4QuantConfig({"m.proj": QuantKind.NVFP4}, fp8)
    with set_default_torch_dtype(BF16):
        layer = ReplicatedLinear(
            width,
            out,
            bias=False,
            params_dtype=BF16,
            quant_config=quant,
            prefix="m.proj",
        )
        fill(layer.weight, layer.weight_scale, layer.weight_scale_2, width, hostile)
        weight = dense_weight(layer)
        layer.quant_method.process_weights_after_loading(layer)
    return layer, weight


def fill(
    weight: torch.Tensor,
    scale: torch.Tensor,
    scale_2: torch.Tensor,
    width: int,
    hostile: bool = False,
) -> None:
    """Random codes and scales; ``hostile``: a largest, a smallest and a zero block scale too."""
    weight.data.random_(0, 256)
    exponent = torch.rand(scale.shape, dtype=torch.float32) * 8
    scale.data.copy_(torch.exp2(exponent).to(torch.float8_e4m3fn))
    # e2m1 has a root mean square of 2.9, 2^(8 u) of 110.
    scale_2.data.fill_(width**-0.5 / 320)
    if hostile:
        rows = scale.data.flatten(0, -2)
        rows[-1, 0], rows[0, 0] = 2.0**-9, 448.0
        if rows.shape[1] > 2:
            rows[::7, -1] = 0.0


def random_experts(
    experts: int,
    hidden: int,
    inner: int,
    nvfp4: bool = True,
    fp8: bool = False,
    hostile: bool = False,
) -> tuple[Any, Any]:
    """(layer, (gate_up, down) float32 or None for many experts), made as ``random_linear`` does.

    ``hostile``: as ``fill``, and outer scales that differ between gate and up, by powers of two.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from sglang_dsv4.checkpoint.quant import QuantKind
    from sglang_dsv4.layers.quant_config import Dsv4QuantConfig

    kind = QuantKind.NVFP4 if nvfp4 else QuantKind.BF16
    kinds = {f"m.experts.0.{part}_proj": kind for part in ("gate", "up", "down")}
    with set_default_torch_dtype(BF16):
        layer = FusedMoE(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=inner,
            layer_id=0,
            top_k=6,
            params_dtype=BF16,
            quant_config=Dsv4QuantConfig(kinds, fp8),
            prefix="m.experts",
            inplace=False,
            swiglu_limit=10.0,
        )
        if not nvfp4:
            for weight, width in ((layer.w13_weight, hidden), (layer.w2_weight, inner)):
                weight.data.normal_(0, width**-0.5)
            return layer, None
        for part, width in (("w13", hidden), ("w2", inner)):
            names = ("weight", "weight_scale", "weight_scale_2")
            fill(*(getattr(layer, f"{part}_{name}") for name in names), width, hostile)
        if hostile:
            layer.w13_weight_scale_2.data[::2, 1] /= 2
            layer.w13_weight_scale_2.data[1::2, 0] /= 4
        dense = dense_experts(layer) if experts <= 16 else None
        layer.quant_method.process_weights_after_loading(layer)
    return layer, dense


def random_topk(tokens: int, experts: int) -> Any:
    """The choices of a router with random logits: 6 of ``experts``."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.randn(tokens, experts)
    weights, ids = logits.softmax(-1).topk(6, dim=-1)
    return StandardTopKOutput(weights, ids.int(), logits)
