"""Drives SGLang's own scheduling objects in this process, without a server.

``Runner`` builds what a scheduler process builds (worker, pools, attention backend, radix cache)
with this plugin loaded, and runs batches that the test composes: which requests extend by how many
tokens, which decode which token. It returns the logits of every position, so that prefill, chunked
prefill, decode and prefix reuse can be compared number by number. Unlike the scheduler it takes
chunks of any length, not only multiples of the page.

One ``Runner`` can live in a process at a time, since SGLang keeps its configuration and process
groups in module globals: ``close()`` one (or use it as a context manager) before the next.
"""

import itertools
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dsv4.envs import PREFILL

MODEL_DIR = Path(__file__).resolve().parents[1] / "sglang_dsv4" / "demo" / "dsv4-tiny-nvfp4"


@dataclass(frozen=True)
class Accounting:
    """Where the slots are, in tokens (`requests` in request rows).

    At any time free + evictable (cached, unlocked) + protected (cached, locked) + what running
    requests own = the capacity.
    """

    full_free: int
    full_evictable: int
    full_protected: int
    swa_free: int
    swa_evictable: int
    swa_protected: int
    requests: int


class Request:
    """One sequence whose tokens the test chooses; made by ``Runner.start``."""

    def __init__(self, req: Any) -> None:
        self.req = req

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the radix cache supplied."""
        return self.req.cached_tokens

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt not yet run or matched."""
        return len(self.req.origin_input_ids) - self.req.prefix_len


class Runner:
    """SGLang's model runner, pools and radix cache for one configuration.

    Args:
        model_path: checkpoint directory.
        kv_cache_dtype: "nvfp4" or "bfloat16".
        max_total_tokens: tokens of the full (compressed) pool. The window pool is as large (a
            server's has a tenth), since a prompt that is not published frees no window slots while
            it is prefilled; give ``swa_full_tokens_ratio`` for a smaller one.
        max_running_requests: request rows.
        context_length: longest sequence.
        dtype: activations and unquantised weights, "bfloat16" or "float32".
        threads: OpenMP threads. SGLang would pin one to each core of the NUMA node, where those of
            parallel test workers spin against each other.
        device: "cpu", or "cuda", where decode runs eagerly (graphs call no hooks).
        prefill: precision of large prefill batches, "bf16" or, on a GPU that has it, "fp8".
        server_args: further fields of ServerArgs.
    """

    def __init__(
        self,
        model_path: Path | str = MODEL_DIR,
        kv_cache_dtype: str = "bfloat16",
        max_total_tokens: int = 16384,
        max_running_requests: int = 8,
        context_length: int = 8192,
        dtype: str = "bfloat16",
        threads: int = 1,
        device: str = "cpu",
        prefill: str = "bf16",
        **server_args: Any,
    ) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.runtime_context import SpawnRanks, get_device, get_schedule, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        fields: dict[str, Any] = dict(
            model_path=str(model_path),
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_running_requests,
            context_length=context_length,
            dtype=dtype,
            mem_fraction_static=0.2,
            swa_full_tokens_ratio=1.0,
            disable_overlap_schedule=True,
            log_level="warning",
        )
        if device == "cuda":
            fields |= dict(disable_cuda_graph=True, sampling_backend="pytorch")
        args = ServerArgs(**(fields | server_args))
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))

        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.mem_cache.kv_cache_builder import build_kv_cache
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        port = PortArgs.init_new(args).nccl_port
        self.model_config = ModelConfig.from_server_args(args)
        cores = os.sched_getaffinity(0)
        bootstrap.init_parallel_runtime(
            server_args=args, device=get_device().device, dist_port=port
        )
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        bootstrap.init_layer_runtime(model_config=self.model_config)
        initialize_moe_config()
        self.device = torch.device(device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PREFILL.name, prefill)
            self.worker = TpModelWorker(server_args=args, gpu_id=0, nccl_port=port)
        self.worker.alloc_memory_pool()
        self.worker.init_attention_backends()
        self.worker.init_cuda_graphs()
        self.model_runner = self.worker.model_runner
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        built = build_kv_cache(
            server_args=args,
            model_config=self.model_config,
            tp_worker=self.worker,
            page_size=get_schedule().page_size,
            spec_algorithm=self.spec_algorithm,
            enable_metrics=False,
            enable_kv_cache_events=False,
            enable_hierarchical_cache=False,
        )
        self.tree_cache = built.tree_cache
        self.req_to_token_pool = built.req_to_token_pool
        self.allocator = built.token_to_kv_pool_allocator
        self.pool = self.model_runner.token_to_kv_pool
        self._hidden: list[Tensor] = []
        self._ids = itertools.count()
        self.model_runner.model.logits_processor.register_forward_pre_hook(
            self._keep_hidden, with_kwargs=True
        )

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tear down the process groups, so that another Runner can be built."""
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()

    def start(self, ids: Sequence[int], reuse: bool = False) -> Request:
        """A new request with ``ids`` as its prompt; nothing runs yet.

        Args:
            ids: the prompt, at least one token.
            reuse: adopt the longest prefix that the radix cache holds (at most len(ids) - 1).
        """
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req(
            rid=str(next(self._ids)),
            origin_input_text="",
            origin_input_ids=array("q", ids),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
            vocab_size=self.model_config.vocab_size,
        )
        req.init_next_round_input(self.tree_cache if reuse else None)
        if reuse:
            req.lock = self.tree_cache.lock(req.last_node)
        return Request(req)

    def extend(self, parts: Sequence[tuple[Request, int]], publish: bool = False) -> list[Tensor]:
        """One extend batch: each request runs that many further tokens of its prompt.

        Args:
            parts: (request, tokens) pairs.
            publish: insert the full pages so far into the radix cache, as the scheduler does
                between the chunks of a prompt.

        Returns:
            per request f32[tokens, V].
        """
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        reqs = [request.req for request, _ in parts]
        for request, tokens in parts:
            if not 0 < tokens <= request.prompt_left:
                raise ValueError(f"{tokens} tokens of a prompt with {request.prompt_left} left")
            request.req.extend_end = request.req.prefix_len + tokens
        batch = self._new_batch(reqs)
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu.to(self.device)
        batch.prefill_input_ids_cpu = None
        logits = self._forward(batch)
        for req in reqs:
            if publish:
                checkpoint_kv_cache(req, self.tree_cache)
            req.prefix_len = req.extend_end
        return list(logits.split([tokens for _, tokens in parts]))

    def step(self, requests: Sequence[Request], tokens: Sequence[int]) -> Tensor:
        """One decode batch: each request, its prompt run, takes one given token.

        Returns:
            f32[len(requests), V] on the CPU, the logits after those tokens.
        """
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        reqs = [request.req for request in requests]
        lengths = [req.kv.kv_committed_len for req in reqs]
        for request, token in zip(requests, tokens, strict=True):
            if request.prompt_left:
                raise ValueError(f"decode with {request.prompt_left} tokens of the prompt left")
            request.req.output_ids.append(token)
        batch = self._new_batch(reqs)
        batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch.req_pool_indices = batch.req_pool_indices_cpu.to(self.device, copy=True)
        batch.seq_lens_cpu = torch.tensor(lengths)
        batch.seq_lens = batch.seq_lens_cpu.to(self.device, copy=True)
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(
            batch, self.model_config.vocab_size
        )
        batch.input_ids = torch.tensor(list(tokens), device=self.device)
        batch.prepare_for_decode()
        return self._forward(batch)

    def finish(self, request: Request, publish: bool = False) -> None:
        """End the request and free what it owns; with ``publish`` its full pages stay cached."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        request.req.finished_reason = FINISH_LENGTH(length=len(request.req.output_ids))
        release_kv_cache(request.req, self.tree_cache, checkpoint=publish)

    def prefill(self, ids: Sequence[int], chunks: int | Sequence[int] | None = None) -> Tensor:
        """Logits of a prompt run alone, without the radix cache, and freed afterwards.

        Args:
            ids: T token ids.
            chunks: tokens per pass (the last may be shorter) or the length of every pass; None
                takes the prompt in one.

        Returns:
            f32[T, V].
        """
        request = self.start(ids)
        logits = [self.extend([(request, n)])[0] for n in _chunk_lengths(len(ids), chunks)]
        self.finish(request)
        return torch.cat(logits)

    def prefill_batch(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of several prompts run in one extend batch: per prompt f32[T_i, V]."""
        requests = [self.start(ids) for ids in prompts]
        logits = self.extend([(request, request.prompt_left) for request in requests])
        for request in requests:
            self.finish(request)
        return logits

    def decode(self, ids: Sequence[int], prompt_len: int = 1) -> Tensor:
        """Logits of ``ids``, the first ``prompt_len`` prefilled, the rest decoded one by one.

        Returns:
            f32[len(ids), V].
        """
        request = self.start(ids[:prompt_len])
        logits = self.extend([(request, prompt_len)])
        logits += [self.step([request], [token]) for token in ids[prompt_len:]]
        self.finish(request)
        return torch.cat(logits)

    def greedy(
        self, ids: Sequence[int], max_new_tokens: int, chunks: int | None = None
    ) -> list[int]:
        """Greedy continuation of ``ids`` up to and including EOS."""
        request = self.start(ids)
        for tokens in _chunk_lengths(len(ids), chunks):
            logits = self.extend([(request, tokens)])[0]
        output = [int(logits[-1].argmax())]
        eos = self.model_config.hf_eos_token_id
        while output[-1] not in eos and len(output) < max_new_tokens:
            output.append(int(self.step([request], output[-1:])[0].argmax()))
        self.finish(request)
        return output

    def flush(self) -> None:
        """Empty the radix cache and every pool, as /flush_cache does on an idle server."""
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.allocator.clear()

    def accounting(self) -> Accounting:
        """The slots free and cached now."""
        return Accounting(
            full_free=self.allocator.full_available_size(),
            full_evictable=self.tree_cache.full_evictable_size(),
            full_protected=self.tree_cache.full_protected_size(),
            swa_free=self.allocator.swa_available_size(),
            swa_evictable=self.tree_cache.swa_evictable_size(),
            swa_protected=self.tree_cache.swa_protected_size(),
            requests=self.req_to_token_pool.available_size(),
        )

    def _new_batch(self, reqs: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        return ScheduleBatch.init_new(
            reqs=reqs,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree_cache,
            model_config=self.model_config,
            enable_overlap=False,
            spec_algorithm=self.spec_algorithm,
        )

    @torch.no_grad()
    def _forward(self, batch: Any) -> Tensor:
        """Run the batch: f32[tokens of the batch, V] on the CPU, from every token's hidden states.

        The head runs in float32 here; the server's own (bfloat16 operands and result, relative
        rounding 2^-9 of the sum) is compared where it is computed, at each request's last token.
        """
        self._hidden.clear()
        result = self.worker.forward_batch_generation(batch)
        (hidden,) = self._hidden
        logits = hidden.float() @ self.model_runner.model.lm_head.weight.float().T
        logits = logits[:, : self.model_config.vocab_size]
        served = result.logits_output.next_token_logits.float()
        if batch.forward_mode.is_extend():
            last = torch.tensor(batch.extend_lens, device=self.device).cumsum(0) - 1
        else:
            last = torch.arange(len(batch.reqs), device=self.device)
        bound = 2.0**-7 * logits[last].abs().amax(-1, keepdim=True)
        if not bool(((served - logits[last]).abs() <= bound).all()):
            raise AssertionError("next_token_logits are not the head's product of hidden states")
        return logits.cpu()

    def _keep_hidden(self, processor: Any, args: tuple, kwargs: dict) -> None:
        names = ("input_ids", "hidden_states", "lm_head", "logits_metadata")
        bound = dict(zip(names, args, strict=False)) | kwargs
        self._hidden.append(bound["hidden_states"].clone())


def _chunk_lengths(total: int, chunks: int | Sequence[int] | None) -> list[int]:
    """The lengths of the passes over ``total`` tokens; see ``Runner.prefill``."""
    if chunks is None:
        return [total]
    if isinstance(chunks, int):
        return [min(chunks, total - start) for start in range(0, total, chunks)]
    if sum(chunks) != total:
        raise ValueError(f"chunks add up to {sum(chunks)}, wanted {total}")
    return list(chunks)
