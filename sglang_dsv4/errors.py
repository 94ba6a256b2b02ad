"""Errors whose message is one sentence for the user: what was found, wanted, and what to do."""


class Dsv4Error(Exception):
    """Base of every error that sglang_dsv4 raises on purpose."""


class UnsupportedError(Dsv4Error):
    """The device, a version or an option cannot be served."""


class ConfigError(Dsv4Error):
    """The model's config.json lacks or contradicts something that the tensors do not settle."""


class CheckpointError(Dsv4Error):
    """A checkpoint file or tensor is missing, damaged or of the wrong kind."""
