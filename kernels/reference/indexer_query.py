"""Query side of the lightning indexer (paper section 2.3.1 eq. 13): rotate, then Hadamard."""

from torch import Tensor

from .hadamard import hadamard_transform
from .rope import apply_rope_tail


def indexer_query(q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """RoPE of the last `table.shape[-1]` values, then the Hadamard transform that keys had too.

    Args: q float [T, Hi, d]; positions integer [T]; table float32 [max_position, rope_dim].
    Returns [T, Hi, d] in q's dtype, rounded once. Queries are not rounded to FP4: they are not
    stored, and the products are exact either way.
    """
    return hadamard_transform(apply_rope_tail(q.float(), positions, table)).to(q.dtype)
