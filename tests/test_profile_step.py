"""The table of a decode step, from traces whose every microsecond is known."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from sglang_dsv4.bench import profile_step
from sglang_dsv4.bench.step_trace import decode_steps, family, read_trace, rows, short_name
from sglang_dsv4.errors import ConfigError

OURS = (
    "kernel_cutlass_kernel_sglang_dsv4kernelskv_storekv_storeKvStore_object_at__tensorptrbf16gm_0"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>)"
)
MARLIN = "void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1>(int4 const*, int)"
THREAD = 7


def event(cat: str, name: str, ts: float, dur: float, tid: int = THREAD, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def step(start: float, correlation: int, batch: int = 4) -> list[dict]:
    """A forward pass of 100 us, one graph launch in it; 40 us of GPU work from 50 us after start.

    Two kernels overlap by 5 us, one gap of 10 us follows; afterwards the tokens are copied back.
    """
    gpu = start + 50
    return [
        event("user_annotation", f"step[DECODE bs={batch}]", start, 100),
        event("cuda_runtime", "cudaGraphLaunch", start + 20, 10, correlation=correlation),
        event("kernel", OURS, gpu, 10, correlation=correlation, stream=3),
        event("kernel", MARLIN, gpu + 5, 15, correlation=correlation, stream=3),
        event("kernel", ADD, gpu + 30, 2, correlation=correlation, stream=3),
        event("cuda_runtime", "cudaMemcpyAsync", start + 120, 5, correlation=correlation + 1),
        event(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", gpu + 36, 4, correlation=correlation + 1
        ),
        event("cuda_runtime", "cudaEventSynchronize", start + 130, 5),
    ]


def trace(count: int = 3) -> list[dict]:
    return [e for i in range(count) for e in step(1000.0 + 200 * i, 10 * (i + 1))]


def test_a_step_is_what_its_launches_made_run():
    steps = decode_steps([*trace(), {"ph": "M", "name": "process_name"}])
    assert len(steps) == 2  # the third has no end
    for i, found in enumerate(steps):
        assert found.batch == 4
        assert [e.start - 1050 - 200 * i for e in found.events] == [0, 5, 30, 36]
        # 0-20 by two kernels, 30-32, 36-40.
        assert found.busy_us == pytest.approx(26)
        assert found.span_us == pytest.approx(40)
        assert found.syncs == ()
        assert found.waits == ("cudaEventSynchronize",)
        assert found.avoidable == ()


def test_rows_are_averages_over_the_steps():
    found = rows(decode_steps(trace(4)))
    assert [(r.name, r.count, r.us) for r in found] == [
        ("Marlin", 1, 15),
        ("KvStore", 1, 10),
        ("Memcpy DtoH", 1, 4),
        ("vectorized_elementwise_kernel CUDAFunctor_add", 1, 2),
    ]
    assert sum(row.share for row in found) == pytest.approx(1)
    assert [row.family for row in found] == ["Marlin", "this project", "copy, memset", "torch"]


def test_the_most_frequent_batch_or_the_asked_one():
    mixed = [*step(0, 900, batch=1), *trace(4)]
    assert {s.batch for s in decode_steps(mixed)} == {4}
    assert [s.batch for s in decode_steps(mixed, batch=1)] == [1]
    with pytest.raises(ConfigError, match="none of batch 2"):
        decode_steps(mixed, batch=2)


@pytest.mark.parametrize(
    ("cat", "name"),
    [
        ("cuda_runtime", "cudaStreamSynchronize"),
        ("cuda_runtime", "cudaMemcpy"),
        ("cuda_driver", "cuCtxSynchronize"),
    ],
)
def test_what_makes_the_host_wait_inside_the_forward_pass(cat, name, tmp_path, capsys):
    path = tmp_path / "a.trace.json.gz"
    inside = event(cat, name, 1040, 5)
    elsewhere = event(cat, name, 1040, 5, tid=THREAD + 1)
    path.write_bytes(
        gzip.compress(json.dumps({"traceEvents": [*trace(), inside, elsewhere]}).encode())
    )
    first, second = decode_steps(read_trace(path))
    assert (first.syncs, second.syncs) == ((name,), ())
    assert profile_step.main([str(path), "--no-sync"]) == 1
    assert f"inside the forward pass: {name} 0.5\n" in capsys.readouterr().out


def test_a_wait_between_passes_is_the_schedulers_only_once_a_step(tmp_path, capsys):
    """The second one is made by an operator of another's, on the scheduler's thread."""
    path = tmp_path / "a.trace.json"
    operator = event("cpu_op", "aten::item", 1138, 9)
    inner = event("cpu_op", "aten::_local_scalar_dense", 1139, 7)
    wait = event("cuda_runtime", "cudaStreamSynchronize", 1140, 5)
    again = event("cuda_runtime", "cudaEventSynchronize", 1148, 5)
    path.write_text(json.dumps({"traceEvents": [*trace(), operator, inner, wait, again]}))
    first, second = decode_steps(read_trace(path))
    item = "cudaStreamSynchronize (aten::item)"
    assert first.waits == ("cudaEventSynchronize", item, "cudaEventSynchronize")
    assert (first.avoidable, second.avoidable) == ((item, "cudaEventSynchronize"), ())
    assert profile_step.main([str(path), "--no-sync"]) == 1
    assert f"a step: {item} 0.5, cudaEventSynchronize 0.5\n" in capsys.readouterr().out
    path.write_text(json.dumps({"traceEvents": trace()}))
    assert profile_step.main([str(path), "--no-sync"]) == 0


def test_a_copy_to_pageable_memory_waits_whatever_its_call_is_named():
    call = event("cuda_runtime", "cudaMemcpyAsync", 1040, 5, correlation=77)
    copy = "Memcpy DtoH (Device -> Pageable)"
    extra = [call, event("gpu_memcpy", copy, 1060, 1, tid=0, correlation=77)]
    assert decode_steps([*trace(), *extra])[0].syncs == ("cudaMemcpyAsync",)


def test_names_of_what_does_not_wait():
    """An operator's name alone is none: of a tensor on the CPU, an item is at hand."""
    calm = ("cudaMemcpyAsync", "cudaStreamWaitEvent", "cudaEventRecord", "cudaLaunchKernel")
    extra = [event("cuda_runtime", name, 1040, 1) for name in calm]
    extra += [event("cpu_op", name, 1040, 1) for name in ("aten::copy_", "aten::item")]
    assert decode_steps([*trace(), *extra])[0].syncs == ()


def test_printed_numbers_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "a.trace.json", tmp_path / "a.png"
    path.write_text(json.dumps({"traceEvents": trace(5)}))
    assert profile_step.main([str(path), "--picture", str(picture), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "batch 4, 4 steps: 200.0 us from step to step, 40.0 us from the first" in out
    assert "busy 26.0 us, gaps 14.0 us" in out
    assert "4 kernels and copies a step, 1 of them under 3 us" in out
    assert "inside the forward pass: none" in out
    assert "| Marlin | Marlin | 1 | 15.0 | 48.4% |" in out
    assert "| 2 others |  | 2 | 6.0 | 19.4% |" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_short_names():
    assert short_name(ADD) == "vectorized_elementwise_kernel CUDAFunctor_add"
    index = (
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<int> >(int)"
    )
    assert short_name(index).startswith("index_elementwise_kernel")
    assert short_name("void sglang::moe::count_and_sort_expert_tokens_kernel<int>(int)") == (
        "count_and_sort_expert_tokens_kernel"
    )
    assert short_name("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
    assert family("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "matrix product"
    assert family("_router_triton_kernel") == "SGLang and libraries"


def test_not_a_trace(tmp_path: Path, capsys):
    path = tmp_path / "a.json.gz"
    for content in (b"no", gzip.compress(b"{}"), gzip.compress(b"[]")[:-3]):
        path.write_bytes(content)
        assert profile_step.main([str(path)]) == 2
        assert "wanted the .trace.json.gz" in capsys.readouterr().err


def test_a_real_trace_without_decode_steps(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    path = tmp_path / "cpu.json"
    profile.export_chrome_trace(str(path))
    with pytest.raises(ConfigError, match="0 decode steps"):
        decode_steps(read_trace(path))
