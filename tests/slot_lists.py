"""SGLang's lists of an expert's slots, on a CPU."""

import torch


def align(ids, block, experts, *, return_inactive_prefix_count):
    """SGLang's ``moe_align_block_size``, which needs a GPU: slots without an expert come first.

    Beyond the lists there is what an allocation holds by chance.
    """
    assert return_inactive_prefix_count
    flat, rows, owners = ids.flatten(), [], []
    for expert in range(-1, experts):
        own = (flat == expert).nonzero().flatten().tolist()
        own += [len(flat)] * (-len(own) % block)
        rows += own
        owners += [expert] * (len(own) // block)
    counts = torch.tensor([len(rows), owners.count(-1)], dtype=torch.int32)
    rows += [-(1 << 30), 1, 0, 1 << 30] * block
    owners += [0, 1 << 30, -7, 3]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(owners, dtype=torch.int32), counts
