"""The account of a load: every checkpoint tensor is used or named, every parameter is written."""

from collections import Counter
from collections.abc import Iterable

from sglang_dsv4.checkpoint.reader import first_few
from sglang_dsv4.errors import CheckpointError


class Account:
    """Tracks one load; `finish` fails if anything is left over on either side."""

    def __init__(self, tensors: Iterable[str], parameters: Iterable[str]) -> None:
        """`tensors`: the checkpoint's tensor names; `parameters`: the model's parameter names."""
        self._unread = dict.fromkeys(tensors)
        self._unwritten = dict.fromkeys(parameters)
        self._tensors = frozenset(self._unread)
        self._parameters = frozenset(self._unwritten)
        self.skipped: dict[str, str] = {}

    def loaded(self, tensor: str, parameter: str) -> None:
        """Note that a checkpoint tensor went into a parameter; fused parameters take several.

        Raises `CheckpointError` for a name that is not in the checkpoint or the model.
        """
        self._known(tensor, self._tensors, "tensor of the checkpoint")
        self._unread.pop(tensor, None)
        self.derived(parameter)

    def skip(self, tensor: str, reason: str) -> None:
        """Note that a checkpoint tensor is left out on purpose.

        Raises `CheckpointError` for a name that is not in the checkpoint.
        """
        self._known(tensor, self._tensors, "tensor of the checkpoint")
        self._unread.pop(tensor, None)
        self.skipped[tensor] = reason

    def derived(self, parameter: str) -> None:
        """Note that a parameter was filled without a tensor of its own (a default or a product).

        Raises `CheckpointError` for a name that is not in the model.
        """
        self._known(parameter, self._parameters, "parameter of the model")
        self._unwritten.pop(parameter, None)

    def finish(self) -> str:
        """One line that sums up the load.

        Raises `CheckpointError` listing tensors that were neither loaded nor skipped, and
        parameters that nothing was written to.
        """
        problems = []
        if self._unread:
            problems.append(
                f"{len(self._unread)} tensors were neither loaded nor skipped "
                f"({first_few(self._unread, 8)})"
            )
        if self._unwritten:
            problems.append(
                f"{len(self._unwritten)} parameters were not written "
                f"({first_few(self._unwritten, 8)})"
            )
        if problems:
            raise CheckpointError(
                f"The load is incomplete: {' and '.join(problems)}, a complete account was "
                "wanted; check the checkpoint against config.json."
            )
        reasons = Counter(self.skipped.values())
        skipped = "".join(f"; {count} skipped: {reason}" for reason, count in reasons.items())
        loaded = len(self._tensors) - len(self.skipped)
        return f"{loaded} tensors into {len(self._parameters)} parameters{skipped}"

    @staticmethod
    def _known(name: str, names: frozenset[str], what: str) -> None:
        if name not in names:
            raise CheckpointError(
                f"The loader noted {name}, a {what} was wanted; report this, the loader is at "
                "fault."
            )
