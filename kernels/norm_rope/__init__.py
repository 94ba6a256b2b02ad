"""Per-head query norm with RoPE, and the inverse RoPE of attention outputs, on a GPU."""
