"""Expert choice: sqrt(softplus) scores, by top-k or by token-id table (paper section 2.1)."""

import torch
from torch import Tensor

# Below this, softplus(x) = e^x to float32 and log1p would lose what e^(x/2) still holds.
_TINY_LOGIT = -18.0
_SUM_EPS = 1e-20


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + e^x)), finite and positive down to x = -206 (float32 e^(x/2)).

    Args: x float [...]. Returns float32 [...].
    """
    x = x.float()
    softplus = torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
    return torch.where(x < _TINY_LOGIT, torch.exp(x / 2), softplus.sqrt())


def _weigh(scores: Tensor, ids: Tensor, norm: bool, scaling: float) -> Tensor:
    """Scores of the chosen experts [T, k], normalised to sum 1 if asked, times `scaling`."""
    weights = scores.gather(1, ids)
    if norm:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SUM_EPS)
    return weights * scaling


def route_topk(
    logits: Tensor, bias: Tensor, top_k: int, norm: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of largest score + bias; the bias only chooses, it does not weigh.

    Args: logits float [T, E]; bias float [E] (e_score_correction_bias); norm divides the weights
    by their sum; scaling is routed_scaling_factor.
    Returns (weights float32 [T, top_k], ids int64 [T, top_k]), in descending order of choice.
    """
    scores = sqrt_softplus(logits)
    ids = (scores + bias.float()).topk(top_k, dim=-1).indices
    return _weigh(scores, ids, norm, scaling), ids


def route_hash(
    logits: Tensor, tid2eid: Tensor, input_ids: Tensor, norm: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Experts fixed by the token id, weighed by their scores.

    Args: logits float [T, E]; tid2eid integer [V, k]; input_ids integer [T].
    Returns (weights float32 [T, k], ids int64 [T, k]).
    """
    ids = tid2eid[input_ids.long()].long()
    return _weigh(sqrt_softplus(logits), ids, norm, scaling), ids
