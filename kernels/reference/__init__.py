"""Plain-torch semantics of every operation: the CPU path and the test oracle."""
