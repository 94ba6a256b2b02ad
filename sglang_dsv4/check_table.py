"""The preflight's table: one row a check, and below a failed one what to do."""

from collections.abc import Callable
from dataclasses import dataclass

from sglang_dsv4 import __version__
from sglang_dsv4.errors import Dsv4Error
from sglang_dsv4.failure import one_sentence


@dataclass(frozen=True)
class Check:
    """One row: what was found, what was wanted, and the sentence to end with if it does not do."""

    name: str
    found: str
    wanted: str
    fault: str = ""


def render(checks: list[Check]) -> str:
    """The table, one line a check, and below a failed one what to do."""
    rows = [("", "check", "found", "wanted")]
    rows += [("FAIL" if c.fault else "ok", c.name, c.found, c.wanted) for c in checks]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"sglang_dsv4 {__version__} preflight"]
    for row, check in zip(rows, [None, *checks], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
        if check is not None and check.fault:
            lines.append(f"      -> {check.fault}")
    return "\n".join(lines)


def first_fault(checks: list[Check]) -> str:
    """The sentence of the first check that failed; empty when all passed."""
    return next((check.fault for check in checks if check.fault), "")


def guarded(name: str, wanted: str, check: Callable[[], Check]) -> Check:
    """The check's row; one that fails with a sentence of ours where it raises a Dsv4Error."""
    try:
        return check()
    except Dsv4Error as error:
        return Check(name, "see below", wanted, one_sentence(error))
