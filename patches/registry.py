"""Collects the patches, verifies them against the SGLang that is installed, and registers them.

``HookRegistry`` logs and drops a target that does not exist and compares no signatures, so
``register_all`` does both first, and ``verify_applied`` looks afterwards.
Run ``python -m sglang_dsv4.patches.registry`` for the table of all patches.
"""

import pkgutil
from importlib import import_module
from importlib.metadata import version

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_dsv4 import __version__
from sglang_dsv4.failure import stop
from sglang_dsv4.patches.patch import Patch, render_signature

PATCH_MODULES = (
    "server_args",
    "model_config",
    "scheduler",
    "model_runner",
    "model_loader",
    "pool_configurator",
    "kv_cache_configurator",
)
"""Modules of this folder with patches, in the order in which a starting server meets them."""


def all_patches() -> tuple[Patch, ...]:
    """Every patch, in the order of PATCH_MODULES and of each module's PATCHES."""
    modules = (import_module(f"sglang_dsv4.patches.{name}") for name in PATCH_MODULES)
    return tuple(patch for module in modules for patch in module.PATCHES)


def mismatch(patch: Patch) -> str:
    """What is wrong with the target of ``patch``, as a clause; empty when it fits."""
    try:
        found = render_signature(pkgutil.resolve_name(patch.target))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{patch.target} cannot be resolved ({error})"
    if found != patch.signature:
        return f"{patch.target} takes {found}, wanted {patch.signature}"
    return ""


def fault_of(patches: tuple[Patch, ...]) -> str:
    """One sentence that names each target that does not fit; empty when all do."""
    clauses = [clause for clause in map(mismatch, patches) if clause]
    if not clauses:
        return ""
    found = version("sglang")
    return (
        f"sglang_dsv4 {__version__} does not fit the code of sglang {found}: {'; '.join(clauses)}: "
        f"reinstall it with `pip install --force-reinstall --no-deps sglang=={found}`."
    )


def register_all(patches: tuple[Patch, ...] | None = None) -> None:
    """Verify all ``patches`` (default: ``all_patches()``), then register those not yet registered.

    Raises:
        SystemExit: a target is absent or has another signature; nothing was registered then.
    """
    chosen = all_patches() if patches is None else patches
    fault = fault_of(chosen)
    if fault:
        stop(fault)
    for patch in chosen:
        hooks = HookRegistry._hooks.get(patch.target, [])
        if all(hook is not patch.hook for _, hook, _ in hooks):
            HookRegistry.register(patch.target, patch.hook, patch.kind)


def verify_applied() -> None:
    """Check that HookRegistry applied every patch.

    Raises:
        SystemExit: one is missing, so stock code would serve our model.
    """
    missing = [p.target for p in all_patches() if p.target not in HookRegistry._patched]
    if missing:
        stop(
            f"sglang_dsv4 {__version__} is not fully applied: {', '.join(missing)} is still stock "
            f"sglang: look for 'Failed to apply hooks' in the log above."
        )


def main() -> None:
    """Print one block per patch: target, kind, why, and when it can go."""
    for patch in all_patches():
        print(f"{patch.target}  [{patch.kind.value}]")
        print(f"  why:         {patch.why}")
        print(f"  remove when: {patch.remove_when}")
        if patch.upstream:
            print(f"  upstream:    {patch.upstream}")


if __name__ == "__main__":
    main()
