"""How each matrix is stored, from the tensors that exist, not from the config.

| kind | weight | block scale | outer scale | source |
|---|---|---|---|---|
| NVFP4 | U8 [out, in/2] | `weight_scale` F8_E4M3 [out, in/16] | `weight_scale_2` F32 | ModelOpt |
| MXFP4 | U8 or I8 [out, in/2] | `weight_scale_inv` F8_E8M0 [out, in/32] | | DeepSeek experts |
| FP8_BLOCK | F8_E4M3 [out, in] | `weight_scale_inv` [out/128, in/128], rounded up | | DeepSeek |
| BF16 | BF16, F16 or F32 [out, in] | | | unquantised |

The config does not tell: ModelOpt leaves `o_a_proj` unpacked without naming it in its ignore list.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

from sglang_dsv4.checkpoint.reader import Checkpoint, TensorInfo
from sglang_dsv4.errors import CheckpointError

FLOAT_DTYPES = ("BF16", "F16", "F32")
SCALE_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale", "weight_scale_inv")
_SCALAR_SHAPES = ((), (1,))


class QuantKind(Enum):
    """Storage of one matrix."""

    NVFP4 = "nvfp4"
    FP8_BLOCK = "fp8_block"
    MXFP4 = "mxfp4"
    BF16 = "bf16"

    @property
    def values_per_element(self) -> int:
        """Weights in one element of the stored tensor: 2 where packed, else 1."""
        return 2 if self in (QuantKind.NVFP4, QuantKind.MXFP4) else 1


def module_kinds(checkpoint: Checkpoint) -> dict[str, QuantKind]:
    """Kind of every module whose weight is a matrix, by canonical module name.

    Routed experts have one entry per expert and projection, or one per fused tensor. Raises
    `CheckpointError` for a missing scale, and for a scale or a weight of a wrong shape or dtype. A
    missing `input_scale` is no error (`scales.InputScaleReport`).
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    kinds: dict[str, QuantKind] = {}
    for name, info in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" or suffix in SCALE_SUFFIXES:
            modules.setdefault(module, {})[suffix] = info
        elif suffix in ("gate_up_proj", "down_proj"):
            modules[name] = {"weight": info}
    for module, parts in modules.items():
        if "weight" not in parts:
            raise CheckpointError(
                f"{module}.weight is missing, the weight of {parts.popitem()[1].key} was wanted; "
                "fetch the missing shard."
            )
        if len(parts["weight"].shape) > 1:
            kinds[module] = _kind(module, parts)
    return kinds


def has_input_scales(checkpoint: Checkpoint, kinds: Mapping[str, QuantKind]) -> bool:
    """Whether there are NVFP4 matrices and each has an `input_scale`, whatever its value."""
    packed = [module for module, kind in kinds.items() if kind is QuantKind.NVFP4]
    return bool(packed) and all(f"{m}.input_scale" in checkpoint.tensors for m in packed)


def _kind(module: str, parts: Mapping[str, TensorInfo]) -> QuantKind:
    weight = parts["weight"]
    if weight.dtype in FLOAT_DTYPES:
        scales = [part.key for suffix, part in parts.items() if suffix != "weight"]
        if scales:
            raise CheckpointError(
                f"{weight.key} is {weight.dtype} but {scales[0]} exists, a packed weight or no "
                "scale was wanted; export the checkpoint again."
            )
        return QuantKind.BF16
    if len(weight.shape) != 2 or weight.dtype not in ("U8", "I8", "F8_E4M3"):
        raise CheckpointError(
            f"{weight.key} is {weight.dtype} {list(weight.shape)}, a matrix in U8 (FP4), F8_E4M3 "
            f"or {', '.join(FLOAT_DTYPES)} was wanted; export the checkpoint again."
        )
    rows, columns = weight.shape
    if weight.dtype == "F8_E4M3":
        blocks = (-(-rows // 128), -(-columns // 128))
        _require(module, parts, "weight_scale_inv", ("F8_E8M0", "F32", "BF16"), (blocks,))
        return QuantKind.FP8_BLOCK
    width = 2 * columns
    if "weight_scale_inv" in parts:
        _require(module, parts, "weight_scale_inv", ("F8_E8M0", "U8"), ((rows, width // 32),))
        return QuantKind.MXFP4
    _require(module, parts, "weight", ("U8",), (weight.shape,))
    if width % 16:
        raise CheckpointError(
            f"{weight.key} has {width} columns, a multiple of 16 was wanted for NVFP4 blocks; "
            "export the checkpoint again."
        )
    _require(module, parts, "weight_scale", ("F8_E4M3",), ((rows, width // 16),))
    _require(module, parts, "weight_scale_2", ("F32",), _SCALAR_SHAPES)
    if "input_scale" in parts:
        _require(module, parts, "input_scale", ("F32",), _SCALAR_SHAPES)
    return QuantKind.NVFP4


def _require(
    module: str,
    parts: Mapping[str, TensorInfo],
    suffix: str,
    dtypes: Iterable[str],
    shapes: Iterable[tuple[int, ...]],
) -> None:
    info = parts.get(suffix)
    if info is not None and info.dtype in dtypes and info.shape in shapes:
        return
    wanted = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
    if info is None:
        raise CheckpointError(
            f"{module}.{suffix} is missing though {parts['weight'].key} is packed "
            f"({parts['weight'].dtype}), {wanted} was wanted; export the checkpoint again."
        )
    raise CheckpointError(
        f"{info.key} is {info.dtype} {list(info.shape)}, {wanted} was wanted; export the "
        "checkpoint again."
    )
