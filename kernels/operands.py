"""Host side of the row-wise kernels: dtypes, fake tensors for compiling, alignment of operands."""

from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor
from torch import Tensor

CUTE_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.int64: cutlass.Int64,
    torch.uint8: cutlass.Uint8,
}
VECTOR_BYTES = 16


def fake_rows(dtype: torch.dtype, width: int, align: int = VECTOR_BYTES) -> Any:
    """Fake [n, width] whose rows are contiguous, `align` bytes aligned and any distance apart."""
    stride = cute.sym_int64(divisibility=max(1, align // dtype.itemsize))
    return make_fake_tensor(
        CUTE_TYPES[dtype], (cute.sym_int32(), width), (stride, 1), assumed_align=align
    )


def fake_vector(dtype: torch.dtype, size: int | None = None) -> Any:
    """Fake contiguous vector of `size` elements, or of any number."""
    align = VECTOR_BYTES if size is not None else dtype.itemsize
    shape = (cute.sym_int32() if size is None else size,)
    return make_fake_compact_tensor(CUTE_TYPES[dtype], shape, assumed_align=align)


def fake_compact(dtype: Any, sizes: tuple, align: int) -> Any:
    """Fake contiguous tensor of a CuTe type, `align` bytes aligned; sizes may be symbolic."""
    order = tuple(reversed(range(len(sizes))))
    return make_fake_compact_tensor(dtype, sizes, stride_order=order, assumed_align=align)


def aligned_rows(x: Tensor, align: int = VECTOR_BYTES) -> Tensor:
    """x [..., n, width] itself where its rows can be read in `align`-byte vectors, else a copy.

    A slice of a wider projection stays a view.
    """
    item = x.element_size()
    strides = [stride * item % align == 0 for stride in x.stride()[:-1]]
    if x.stride(-1) == 1 and x.data_ptr() % align == 0 and all(strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def index_vector(x: Tensor) -> Tensor:
    """An integer tensor as contiguous int64: itself where it is that already."""
    return x.to(torch.int64).contiguous()


def require_rows(pool: Tensor, align: int) -> None:
    """Check that the kernels can write to a pool [num_pages, >= page_bytes] in place.

    Raises ValueError for a pool whose pages are not contiguous or not `align` bytes aligned.
    """
    if pool.stride(-1) != 1 or pool.stride(0) % align or pool.data_ptr() % align:
        raise ValueError(
            f"found a pool with strides {tuple(pool.stride())} at address {pool.data_ptr():#x}, "
            f"wanted contiguous pages aligned to {align} bytes: allocate it with torch.empty"
        )
