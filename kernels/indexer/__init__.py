"""Lightning indexer of CSA on a GPU: query, scores over FP4 keys, exact top-k."""
