"""Token-level compression of KV (CSA, HCA, indexer keys) on a GPU."""
