"""Hyper-connections (mHC) on a GPU."""
