"""SGLang's own server with this plugin's defaults, a preflight table and errors in one sentence.

``python -m sglang_dsv4.launch_server --model-path DIR ...`` takes every option of ``sglang serve``;
each default below gives way to the same option on the command line or in ``--config``.
"""

import argparse
import os
import sys
import tempfile
from typing import TYPE_CHECKING

from sglang_dsv4 import envs, preflight
from sglang_dsv4.errors import Dsv4Error
from sglang_dsv4.failure import EXIT_STATUS, one_sentence, stop

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

OPTIONS = (
    *("--kv-cache-dtype", "nvfp4"),
    *("--attention-backend", "dsv4_nvfp4"),
    *("--reasoning-parser", "deepseek-v4"),
    *("--tool-call-parser", "deepseekv4"),
    "--enable-cache-report",
)
# A request of the model's whole context (1 Mi tokens) fits; more would only reserve memory.
CPU_MAX_TOTAL_TOKENS = 1 << 20
# Each running request has a ring of float32 states in every HCA layer, 512 KiB a layer.
CPU_MAX_RUNNING_REQUESTS = 32
# Read by stock SGLang before it looks at the checkpoint: its experts are not MXFP4.
ENVIRONMENT = {"SGLANG_DSV4_FP4_EXPERTS": "0"}


def main(argv: list[str] | None = None) -> int:
    """Check, then serve until stopped; the exit status, 2 after a sentence of ours."""
    argv = sys.argv[1:] if argv is None else argv
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A file without a name, since a server that is told to stop kills itself and cleans nothing up;
    # its descriptor has a path as long as this process lives.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as sentence:
        os.environ[envs.FAILURE_FILE.name] = f"/proc/{os.getpid()}/fd/{sentence.fileno()}"
        try:
            _serve(argv)
        except Dsv4Error as error:
            print(one_sentence(error), file=sys.stderr, flush=True)
            return EXIT_STATUS
        except Exception:
            # A scheduler that stopped with a sentence has closed its pipe, which SGLang raises
            # as an error of its own; the sentence is what the user needs.
            text = sentence.read()
            if not text:
                raise
            print(text, end="", file=sys.stderr, flush=True)
            return EXIT_STATUS
        finally:
            del os.environ[envs.FAILURE_FILE.name]
    return 0


def with_config(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """``argv`` with the options of ``--config FILE`` before all others, as SGLang orders them."""
    if "--config" not in argv:
        return argv
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    return ConfigArgumentMerger(parser).merge_config_with_args(argv)


def cpu_options(model_path: str, tp_size: int) -> list[str]:
    """Options that keep a server on a CPU host modest: device, pool size, requests.

    The fraction is of the memory that is free now, and covers the weights and the pools.
    """
    free = preflight.free_bytes("cpu")
    static = preflight.cpu_weight_bytes(model_path, tp_size) + preflight.CPU_POOL_BYTES
    return [
        *("--device", "cpu"),
        *("--mem-fraction-static", f"{min(static / free, 0.9):.3f}"),
        *("--max-total-tokens", str(CPU_MAX_TOTAL_TOKENS)),
        *("--max-running-requests", str(CPU_MAX_RUNNING_REQUESTS)),
        "--sleep-on-idle",
    ]


def prepare(argv: list[str]) -> "ServerArgs":
    """Run the preflight, print its table, and parse the options with the defaults before them.

    Raises:
        SystemExit: a check failed, or argparse refused an option.
    """
    checks = preflight.environment_checks()
    _stop_on_fault(checks)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    from sglang_dsv4.memory_plan import Options

    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang_dsv4.launch_server")
    ServerArgs.add_cli_args(parser)
    argv = with_config(argv, parser)
    asked = parser.parse_args([*OPTIONS, *argv])
    device = asked.device or preflight.default_device()
    checks += preflight.model_checks(
        asked.model_path, device, asked.kv_cache_dtype, asked.tp_size, Options.of(asked)
    )
    _stop_on_fault(checks)
    defaults = list(OPTIONS)
    if device == "cpu":
        defaults += cpu_options(asked.model_path, asked.tp_size)
    print(preflight.render(checks))
    print(f"defaults: {' '.join(defaults)}", flush=True)
    return prepare_server_args([*defaults, *argv])


def _stop_on_fault(checks: list[preflight.Check]) -> None:
    fault = preflight.first_fault(checks)
    if fault:
        print(preflight.render(checks), flush=True)
        stop(fault)


def _serve(argv: list[str]) -> None:
    server_args = prepare(argv)

    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    sys.exit(main())
