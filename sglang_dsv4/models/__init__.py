"""The model, written to be read beside the paper."""
