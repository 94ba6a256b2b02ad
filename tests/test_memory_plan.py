"""What a rank needs of its GPU, for the published shapes and GPUs of stated sizes."""

import argparse
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sglang_dsv4 import memory_plan
from sglang_dsv4.bench import header_only
from sglang_dsv4.bench.published import FLASH, PRO
from sglang_dsv4.cache.kv_layout import KVFormat
from sglang_dsv4.errors import UnsupportedError
from sglang_dsv4.layers.weight_kernels import EXPERTS_SCRATCH, WeightKernel, weight_kernels
from sglang_dsv4.memory_plan import (
    GIB,
    KERNEL_SCRATCH,
    MIB,
    Options,
    activation_bytes,
    check_ranks,
    divisors,
    linear_scratch,
    weight_bytes,
)
from sglang_dsv4.model_source import ModelSource, open_source

H200, B200 = 140 * GIB, 179 * GIB
SERVER = Options(
    fraction=0.88,
    context_length=1 << 20,
    max_running_requests=256,
    chunk=8192,
    graph_batch=256,
)
NVFP4 = KVFormat.NVFP4
HOPPER = weight_kernels((9, 0))
plan = partial(memory_plan.plan, kernels=HOPPER)
remedy = partial(memory_plan.remedy, kernels=HOPPER)


def with_options(**changes) -> Options:
    return Options(**{**vars(SERVER), **changes})


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("shapes") / "flash"
    header_only.write_header_only_checkpoint(path, FLASH)
    return open_source(str(path))


@pytest.fixture(scope="module")
def pro(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """V4-Pro with 12 of its 384 experts, since the headers of all take seconds."""
    path = tmp_path_factory.mktemp("shapes") / "pro"
    header_only.write_header_only_checkpoint(path, PRO | {"n_routed_experts": 12})
    return open_source(str(path))


def test_the_parts_of_v4_flash_on_two_h200(flash: ModelSource):
    found = plan(flash, NVFP4, with_options(tp_size=2), H200)
    static, dynamic = list(found.static.values()), list(found.dynamic.values())
    assert found.static["weights"] == weight_bytes(flash, 2)[1]
    # Two tables of 64 float32 for each position of a 1 Mi context.
    assert found.static["rotary tables"] == 2 * 64 * 4 * (1 << 20)
    # 33152 rows of 1024 float32 in 20 layers (test_capacity).
    assert found.static["states of 256 requests"] == 33152 * 1024 * 4 * 20
    assert found.static["1048576 tokens of KV"] == int(4756.2 * (1 << 20))
    left = H200 * 0.88 - sum(static[:3])
    assert found.tokens == int(left / 4756.2) // 256 * 256
    # Graphs 2 MiB a batch size, 1/8 GiB a rank for its peers, half a GiB for CUDA.
    assert dynamic[2] == 512 * MIB + 2 * GIB // 8 + 256 * 2 * MIB
    assert dynamic[1] == KERNEL_SCRATCH + 32768 * 1024 * 2 // 2  # q_b_proj's half in bfloat16
    assert found.needed == sum(static) + sum(dynamic)
    assert found.fault() == ""
    assert found.wanted() == (
        f"{sum(static) / GIB:.1f} GiB static and {sum(dynamic) / GIB:.1f} beside; with 0.88 "
        f"static, {found.tokens} tokens of context"
    )


def test_activations_are_those_of_the_larger_half_of_a_layer(flash: ModelSource, pro: ModelSource):
    """V4-Flash whole: attention with 64 heads is larger than six experts a token; 8 ranks: less."""
    tokens, context = 8192, 1 << 20
    hidden = tokens * 4096 * 2
    streams = 2 * 4 * hidden + 3 * hidden
    attention = tokens * (4 * 64 * 512 * 2 + 8192 * 12)
    assert activation_bytes(flash.dims, tokens, context, 1) == streams + attention
    # Of eight ranks' attention the lists are left, and the experts are larger: 6 x (4096 + 3 x 2048
    # / 8) values a token, and their weights a part at a time.
    experts = tokens * 6 * (4096 + 768) * 2 + EXPERTS_SCRATCH
    assert activation_bytes(flash.dims, tokens, context, 8) == streams + experts
    assert activation_bytes(flash.dims, tokens, 128, 8) == streams + experts
    assert activation_bytes(pro.dims, tokens, context, 8) > streams


def test_the_largest_linear_layer_of_a_rank_is_widened(flash: ModelSource, pro: ModelSource):
    """q_b_proj where it is split over few ranks; of eight, what each rank holds whole is larger."""
    assert linear_scratch(flash, 1, HOPPER, 8192, False) == 32768 * 1024 * 2
    # o_b_proj of V4-Pro, [7168, 16384], is larger than its q_b_proj, [65536, 1536].
    assert linear_scratch(pro, 1, HOPPER, 8192, False) == 7168 * 16384 * 2
    # The indexer's q_b_proj and CSA's kv and gate are of as many values.
    assert linear_scratch(flash, 8, HOPPER, 8192, False) == 8192 * 1024 * 2
    others = [weight_kernels((8, 0)), weight_kernels(None), weight_kernels((10, 0))]
    for kernels in (*others, weight_kernels((9, 0), WeightKernel.MARLIN)):
        for fp8 in (False, True):
            assert linear_scratch(flash, 1, kernels, 8192, fp8) == 0


def test_fp8_takes_a_byte_a_value_of_weight_and_activations(flash: ModelSource, pro: ModelSource):
    """And a float32 for each row; o_b_proj [4096, 8192] needs most, its inputs split over ranks."""
    tokens = 8192
    assert linear_scratch(flash, 1, HOPPER, tokens, True) == (4096 + tokens) * (8192 + 4)
    assert linear_scratch(flash, 2, HOPPER, tokens, True) == (4096 + tokens) * (4096 + 4)
    assert linear_scratch(pro, 1, HOPPER, tokens, True) == (7168 + tokens) * (16384 + 4)
    # A weight in bfloat16 is larger than in FP8 with few rows beside it.
    assert linear_scratch(flash, 1, HOPPER, 600, True) == 32768 * 1024 * 2
    wide = plan(flash, NVFP4, with_options(tp_size=2), H200)
    narrow = plan(flash, NVFP4, with_options(tp_size=2), H200, fp8=True)
    more = (4096 + tokens) * (4096 + 4) - 32768 * 1024
    assert narrow.needed - wide.needed == more
    assert narrow.static == wide.static


def test_fp8_experts_fit_what_is_counted_for_experts(flash: ModelSource, pro: ModelSource):
    """The clamped SwiGLU and the result in bfloat16, one of them beside its operand in e4m3."""
    for source, tokens in itertools.product((flash, pro), (512, 8192)):
        for tp in divisors(source.dims):
            dims, inner = source.dims, source.dims.moe_intermediate_size // tp
            slots = tokens * dims.num_experts_per_tok
            held = slots * (dims.hidden_size + inner) * 2
            rows = max(tokens * (dims.hidden_size + 4), slots * (inner + 4))
            counted = slots * (dims.hidden_size + 3 * inner) * 2
            assert held + rows <= counted
            # 128 positions have one HCA entry, so that attention is smaller from some ranks on.
            hidden = tokens * dims.hidden_size * 2 * (2 * dims.hc_mult + 3)
            widened = 3 * dims.n_routed_experts * dims.hidden_size * inner * 2
            found = activation_bytes(dims, tokens, 128, tp) - hidden
            assert found >= counted + min(EXPERTS_SCRATCH, widened)


def test_a_packed_o_a_proj_counts_as_the_bfloat16_that_it_becomes(flash: ModelSource):
    """Headers of a packed one in V4-Flash: 43 layers of 8 x [1024, 4096], split over the ranks."""
    values, layers = 8 * 1024 * 4096, 43
    before = weight_bytes(flash, 2, HOPPER)
    tensors = dict(flash.checkpoint.tensors)
    for layer in range(layers):
        module = f"model.layers.{layer}.self_attn.o_a_proj"
        plain = tensors[f"{module}.weight"]
        rows, columns = plain.shape
        assert (rows * columns, plain.dtype) == (values, "BF16")
        packed = {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // 16)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        }
        for name, (dtype, shape) in packed.items():
            tensors[f"{module}.{name}"] = replace(plain, dtype=dtype, shape=shape)
    source = replace(flash, checkpoint=replace(flash.checkpoint, tensors=tensors))
    assert weight_bytes(source, 2, HOPPER) == before
    assert plan(source, NVFP4, SERVER, H200).static["weights"] == before[0]
    # As stored: half a byte a value, a scale for sixteen, and two numbers a matrix.
    whole, rank = weight_bytes(source, 2)
    assert before[0] - whole == layers * (values * 2 - values // 2 - values // 16 - 8)
    assert before[1] - rank == layers * ((values * 2 - values // 2 - values // 16) // 2 - 8)


def test_v4_flash_does_not_fit_one_h200_and_the_remedy_is_two(flash: ModelSource):
    found = plan(flash, NVFP4, SERVER, H200)
    assert found.fault().startswith(
        "A rank has 123.2 GiB for its static memory (0.88 of 140.0 GiB), wanted 160.2 (weights "
        "152.49, rotary tables 0.50, states of 256 requests 2.53, 1048576 tokens of KV 4.64)"
    )
    assert found.tokens == 0
    assert remedy(flash, NVFP4, SERVER, H200) == "use --tp-size 2"


def test_v4_flash_fits_one_b200_with_a_larger_share(flash: ModelSource):
    """160.2 GiB of 179 are 0.895, rounded up; 4.9 are wanted beside."""
    assert (
        plan(flash, NVFP4, SERVER, B200).fault().startswith("A rank has 157.5 GiB for its static")
    )
    assert remedy(flash, NVFP4, SERVER, B200) == "pass --mem-fraction-static 0.895"
    assert plan(flash, NVFP4, with_options(fraction=0.895), B200).fault() == ""


def test_too_large_a_share_leaves_no_room_for_a_chunk(flash: ModelSource):
    options = with_options(tp_size=2, fraction=0.99)
    fault = plan(flash, NVFP4, options, H200).fault()
    assert fault.startswith("A rank has 1.4 GiB beside its static memory (0.99 of 140.0 GiB)")
    assert "a chunk of 8192 tokens 2.44" in fault
    assert remedy(flash, NVFP4, options, H200).startswith("pass --mem-fraction-static 0.")
    assert plan(flash, NVFP4, with_options(tp_size=2), H200).fault() == ""


def test_limits_that_fit_nowhere_are_named(flash: ModelSource):
    options = with_options(tp_size=8, max_total_tokens=1 << 26)
    assert plan(flash, NVFP4, options, H200).fault()
    assert "or lower --context-length" in remedy(flash, NVFP4, options, H200)
    # An upper limit on the pool is also what it holds.
    small = plan(flash, NVFP4, with_options(tp_size=8, max_total_tokens=4096), H200)
    assert small.tokens == 4096
    assert "4096 tokens of KV" in small.static


def test_bfloat16_records_take_the_room_of_two_and_a_half_nvfp4_ones(flash: ModelSource):
    options = with_options(tp_size=2)
    nvfp4 = plan(flash, NVFP4, options, H200).tokens
    bfloat16 = plan(flash, KVFormat.BFLOAT16, options, H200).tokens
    assert nvfp4 / bfloat16 == pytest.approx(11955.2 / 4756.2, rel=1e-3)


def test_without_options_the_pool_must_hold_a_chunk_of_sglangs_size(flash: ModelSource):
    """8192 tokens on an H200, 16384 on a GPU of 160 GiB or more; 256 requests; 0.88."""
    for gpu, chunk in ((H200, 8192), (B200, 16384)):
        found = plan(flash, NVFP4, Options(tp_size=4), gpu)
        assert f"{chunk} tokens of KV" in found.static
        assert f"a chunk of {chunk} tokens" in found.dynamic
        assert "states of 256 requests" in found.static
        assert found.fraction == 0.88


def test_only_tensor_parallelism_splits_the_model(flash: ModelSource, pro: ModelSource):
    """V4-Pro's experts of 3072 are 24 tiles of 128: 16 ranks would cut one."""
    assert divisors(flash.dims) == [1, 2, 4, 8]
    assert divisors(pro.dims) == [1, 2, 4, 8]
    for size in (3, 16):
        with pytest.raises(UnsupportedError, match=f"--tp-size is {size}, wanted a divisor"):
            check_ranks(flash.dims, Options(tp_size=size))
    with pytest.raises(UnsupportedError, match="24 tiles of 128 in an expert"):
        check_ranks(pro.dims, Options(tp_size=16))
    for name in ("attn_dp_size", "ep_size", "pp_size"):
        option = f"--{name.replace('_', '-')}"
        with pytest.raises(UnsupportedError, match=f"{option} is 2, wanted 1"):
            check_ranks(flash.dims, Options(tp_size=8, **{name: 2}))
    check_ranks(flash.dims, Options(tp_size=8))


def test_options_are_read_from_sglangs_command_line():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    line = (
        "--model-path x --tp-size 8 --mem-fraction-static 0.9 --context-length 4096 "
        "--max-running-requests 64 --chunked-prefill-size 2048 --cuda-graph-max-bs-decode 32"
    )
    wanted = Options(
        tp_size=8,
        fraction=0.9,
        context_length=4096,
        max_running_requests=64,
        chunk=2048,
        graph_batch=32,
    )
    assert Options.of(parser.parse_args(line.split())) == wanted
    old = "--model-path x --tp-size 8 --dp-size 4 --enable-dp-attention"
    assert Options.of(parser.parse_args(old.split())).attn_dp_size == 4


def test_the_headers_of_a_folder_are_those_of_the_shapes(tmp_path: Path, capsys):
    assert header_only.main(["flash", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} exists, wanted a new folder: name another.\n"
