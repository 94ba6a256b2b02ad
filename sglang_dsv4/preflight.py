"""What must hold before a server starts: a table of found and wanted, and what to do.

``python -m sglang_dsv4.preflight MODEL_DIR`` prints it alone; ``launch_server`` prints it first.
Checks read headers and metadata only, so they take no longer than the imports they need.
"""

import argparse
import os
import sys
import warnings
from collections import Counter
from dataclasses import replace
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING

from sglang_dsv4 import __version__, plugin
from sglang_dsv4.check_table import Check, first_fault, guarded, render
from sglang_dsv4.failure import EXIT_STATUS

if TYPE_CHECKING:
    from sglang_dsv4.memory_plan import Options

GIB = 1 << 30
PYTHON = (3, 11)
# What a CPU's pools get unless the user says otherwise: the machine has other work to do.
CPU_POOL_BYTES = 2 * GIB
# Resident size of the server's three processes (HTTP, scheduler, detokenizer) without a model.
CPU_PROCESS_BYTES = 4 * GIB


def environment_checks() -> list[Check]:
    """Python, the pinned versions, and whether SGLang will load this plugin as it was written."""
    checks = [_python(), _sglang(), _pinned("torch"), _pinned("transformers"), _selected()]
    if not any(check.fault for check in checks):
        checks.append(_patches())
    return checks


def model_checks(
    model_path: str,
    device: str,
    kv_cache_dtype: str,
    tp_size: int,
    options: "Options | None" = None,
) -> list[Check]:
    """The device and its kernels, the checkpoint with its tokenizer, the KV pool, the memory.

    Args:
        model_path: checkpoint directory or hub id.
        device: ``cpu`` or ``cuda``.
        kv_cache_dtype: as ``--kv-cache-dtype``.
        tp_size: ranks that share the weights.
        options: the others that memory depends on; SGLang's defaults when None.
    """
    from sglang_dsv4.memory_plan import Options

    options = replace(options or Options(), tp_size=tp_size)
    checks = [guarded("device", "a CPU, or kernels for it", lambda: _device(device))]
    checks.append(guarded("checkpoint", "DeepSeek-V4", lambda: _checkpoint(model_path)))
    if checks[-1].fault:
        return checks
    checks.append(guarded("tokenizer", "tokenizer.json", lambda: _tokenizer(model_path)))
    checks.append(
        guarded("KV cache", "nvfp4 or bfloat16", lambda: _kv_cache(model_path, kv_cache_dtype))
    )
    checks.append(guarded("ranks", "a split of the model", lambda: _ranks(model_path, options)))
    if device == "cpu":
        checks.append(guarded("memory", "room", lambda: _cpu_memory(model_path, tp_size)))
    elif not first_fault(checks):
        checks.append(
            guarded("memory", "room", lambda: _gpu_memory(model_path, kv_cache_dtype, options))
        )
    return checks


def default_device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def free_bytes(device: str) -> int:
    """Memory that a rank may use now: of the device, or of a CPU's NUMA node."""
    from sglang.srt.utils.common import get_available_gpu_memory

    return int(get_available_gpu_memory(device, 0) * GIB)


def gpu_bytes() -> int:
    """Memory of a GPU, used or not."""
    import torch

    return torch.cuda.mem_get_info()[1]


def cpu_weight_bytes(model_path: str, tp_size: int) -> int:
    """Bytes of one rank's weights once loaded on a CPU."""
    from sglang_dsv4 import memory_plan
    from sglang_dsv4.layers.weight_kernels import weight_kernels
    from sglang_dsv4.model_source import open_source

    return memory_plan.weight_bytes(open_source(model_path), tp_size, weight_kernels(None))[1]


def _python() -> Check:
    found, wanted = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON))
    fault = ""
    if sys.version_info < PYTHON:
        fault = (
            f"sglang_dsv4 {__version__} needs Python {wanted} or newer, found {found}: make a "
            f"virtual environment with a newer one."
        )
    return Check("python", found, f"{wanted} or newer", fault)


def _sglang() -> Check:
    def check() -> Check:
        plugin.check_versions()
        wanted = str(plugin.pin(plugin.DISTRIBUTION, "sglang"))
        return Check("sglang", version("sglang"), f"{wanted} exactly")

    return guarded("sglang", "the pinned release", check)


def _pinned(name: str) -> Check:
    """A dependency that SGLang pins; torch is checked by ``check_versions``, others only shown."""

    def check() -> Check:
        return Check(name, version(name), f"{plugin.pin('sglang', name)} (pinned by sglang)")

    return guarded(name, "what sglang pins", check)


def _selected() -> Check:
    group = "sglang.srt.plugins"
    wanted = "installed, and not left out of SGLANG_PLUGINS"
    chosen = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in chosen.split(",") if name.strip()}
    if not entry_points(group=group, name=plugin.DISTRIBUTION):
        return Check(
            "plugin",
            "not installed",
            wanted,
            f"The plugin {plugin.DISTRIBUTION} is not among the entry points of {group}: install "
            f"it with `pip install -e .` in its checkout.",
        )
    if names and plugin.DISTRIBUTION not in names:
        return Check(
            "plugin",
            f"SGLANG_PLUGINS={chosen}",
            wanted,
            f"SGLANG_PLUGINS is {chosen!r}, which leaves {plugin.DISTRIBUTION} out: unset it or "
            f"add {plugin.DISTRIBUTION} to it.",
        )
    return Check("plugin", "active", wanted)


def _patches() -> Check:
    with warnings.catch_warnings():
        # SGLang warns of GPU-only quantisations when it is first imported on a CPU.
        warnings.simplefilter("ignore")
        from sglang_dsv4.patches.registry import all_patches, fault_of

        patches = all_patches()
        count, fault = len(patches), fault_of(patches)
    found = "see below" if fault else f"{count} fit"
    return Check("patches", found, f"all {count} fit sglang's code", fault)


def _device(device: str) -> Check:
    import torch

    from sglang_dsv4.kernels.dispatch import REFERENCE, operations_for

    operations = operations_for(torch.device(device))
    kernels = "plain-torch reference" if operations == REFERENCE else "kernels of this plugin"
    if device == "cpu":
        found = f"cpu, {len(os.sched_getaffinity(0))} cores"
    else:
        major, minor = torch.cuda.get_device_capability()
        found = f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
    return Check("device", f"{found}: {kernels}", "a CPU, or a GPU with kernels")


def _checkpoint(model_path: str) -> Check:
    from sglang_dsv4.model_source import open_source

    source = open_source(model_path)
    counts = Counter(kind.value for kind in source.kinds.values())
    matrices = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    size = sum(info.nbytes for info in source.checkpoint.tensors.values())
    found = f"{source.dims.num_hidden_layers} layers, {size / GIB:.2f} GiB; matrices: {matrices}"
    return Check("checkpoint", found, "DeepSeek-V4, every tensor known")


def _tokenizer(model_path: str) -> Check:
    from sglang_dsv4.model_source import open_source

    config = open_source(model_path).checkpoint.path / "tokenizer_config.json"
    fault = ""
    if not config.is_file():
        fault = f"{config} is missing, wanted the tokenizer's settings: copy the file there."
    wanted = "tokenizer.json, tokenizer_config.json"
    return Check("tokenizer", "see below" if fault else "both", wanted, fault)


def _kv_cache(model_path: str, dtype: str) -> Check:
    from sglang_dsv4.cache.capacity import Capacity
    from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
    from sglang_dsv4.model_source import open_source

    kv_format = KVFormat.from_option(dtype)
    per_token = Capacity(open_source(model_path).dims, kv_format).per_token().total
    record = RecordLayout(kv_format, 64).record_bytes
    found = f"{kv_format.value}: {record} B a record, {per_token:.0f} B a token of context"
    return Check("KV cache", found, " or ".join(KVFormat))


def _ranks(model_path: str, options: "Options") -> Check:
    from sglang_dsv4.memory_plan import check_ranks, divisors
    from sglang_dsv4.model_source import open_source

    dims = open_source(model_path).dims
    check_ranks(dims, options)
    wanted = ", ".join(str(n) for n in divisors(dims))
    return Check("ranks", f"--tp-size {options.tp_size}", f"one of {wanted}")


def _cpu_memory(model_path: str, tp_size: int) -> Check:
    weights = cpu_weight_bytes(model_path, tp_size)
    free, needed = free_bytes("cpu"), weights + CPU_POOL_BYTES + CPU_PROCESS_BYTES
    found = f"{free / GIB:.1f} GiB free"
    wanted = f"{needed / GIB:.1f} GiB: weights {weights / GIB:.2f} and what a server needs beside"
    fault = ""
    if free < needed:
        fault = (
            f"The memory of cpu has {found}, wanted {needed / GIB:.1f} GiB a rank for weights "
            f"and pools: free some, or spread the model with --tp-size."
        )
    return Check("memory", found, wanted, fault)


def _gpu_memory(model_path: str, kv_cache_dtype: str, options: "Options") -> Check:
    import torch

    from sglang_dsv4 import memory_plan
    from sglang_dsv4.cache.kv_layout import KVFormat
    from sglang_dsv4.layers.prefill_precision import choose_prefill
    from sglang_dsv4.layers.weight_kernels import weight_kernels_of
    from sglang_dsv4.model_source import open_source

    source, kv_format = open_source(model_path), KVFormat.from_option(kv_cache_dtype)
    gpu, free = gpu_bytes(), free_bytes("cuda")
    kernels = weight_kernels_of(torch.device("cuda"))
    fp8 = choose_prefill(kernels, source.quantized_activations).fp8
    wanted = (source, kv_format, options, gpu, kernels, fp8)
    plan = memory_plan.plan(*wanted)
    fault = plan.fault()
    if fault:
        fault += f": {memory_plan.remedy(*wanted)}."
    elif free < plan.needed:
        fault = (
            f"The GPU has {free / GIB:.1f} GiB free of {gpu / GIB:.1f}, wanted "
            f"{plan.needed / GIB:.1f} GiB a rank: stop what else runs on it."
        )
    found = f"{gpu / GIB:.1f} GiB a GPU, {free / GIB:.1f} free"
    return Check("memory", found, plan.wanted(), fault)


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0, or 2 with the first fault's sentence on stderr."""
    parser = argparse.ArgumentParser(prog="sglang_dsv4.preflight", description=__doc__)
    parser.add_argument("model_dir", help="checkpoint directory")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--kv-cache-dtype", default="nvfp4", help="as of the server")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share the weights")
    parser.add_argument("--mem-fraction-static", type=float, help="of a GPU's memory")
    kept = ("context_length", "max_total_tokens", "max_running_requests")
    for name in (*kept, "chunked_prefill_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="as of the server")
    args = parser.parse_args(argv)
    checks = environment_checks()
    if not first_fault(checks):
        from sglang_dsv4.memory_plan import Options

        sizes = {name: getattr(args, name) for name in kept}
        options = Options(
            fraction=args.mem_fraction_static, chunk=args.chunked_prefill_size, **sizes
        )
        device = args.device or default_device()
        checks += model_checks(args.model_dir, device, args.kv_cache_dtype, args.tp_size, options)
    print(render(checks), flush=True)
    fault = first_fault(checks)
    if fault:
        print(fault, file=sys.stderr)
    return EXIT_STATUS if fault else 0


if __name__ == "__main__":
    sys.exit(main())
