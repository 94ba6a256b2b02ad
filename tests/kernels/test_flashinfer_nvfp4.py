"""FlashInfer's readers on Blackwell: layout, choice, arguments and conventions. No GPU.

No kernel of FlashInfer runs here. Its Python code does, up to the launch, with the arguments that
this project passes; the launch is `flashinfer_contract.attention`, which reads the bytes it gets
by FlashInfer's headers.
"""

import logging
import re

import flashinfer_contract as contract
import pytest
import torch

from sglang_dsv4.cache.kv_layout import KVFormat, RecordLayout
from sglang_dsv4.envs import ATTENTION_KERNEL
from sglang_dsv4.kernels.attention import flashinfer_nvfp4 as op
from sglang_dsv4.kernels.attention import flashinfer_readers as readers
from sglang_dsv4.kernels.attention import sparse_attention as portable
from sglang_dsv4.kernels.attention.flashinfer_nvfp4 import accepts, route
from sglang_dsv4.kernels.attention.flashinfer_readers import WORKSPACE_BYTES, CallShape
from sglang_dsv4.kernels.reference.kv_store import read_records, write_records
from sglang_dsv4.kernels.reference.norm_rope import inverse_rope
from sglang_dsv4.kernels.reference.rope import build_rope_table
from sglang_dsv4.kernels.reference.sparse_attention import sparse_attention as reference

WINDOW = RecordLayout(KVFormat.NVFP4, 64)
C4 = RecordLayout(KVFormat.NVFP4, 64)
C128 = RecordLayout(KVFormat.NVFP4, 2)
ARCHS = ("sm_100a", "sm_103a", "sm_120a", "sm_121a")
# Half a unit in the last of bf16's 8 bits: FlashInfer's output. With the log-sum-exp its product
# with the keys' share is rounded again; a product with a power of two is exact.
ONE_ROUNDING = 2.0**-8
ROTATION = (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 64))


def pool(layout, pages, seed):
    """Random records of unit size, with one of zeros and one of tiny values (subnormal scales)."""
    count = pages * layout.page_size
    latent = torch.randn(count, 512, generator=torch.Generator().manual_seed(seed))
    latent[0], latent[1] = 0.0, latent[1] * 0.02
    bytes_ = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8)
    write_records(latent, torch.arange(count), bytes_, layout)
    return bytes_


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """FlashInfer as installed on a host with a compiler; caches empty before and after."""
    monkeypatch.delenv(ATTENTION_KERNEL.name, raising=False)
    monkeypatch.setattr(op, "_installation_fault", lambda: "")
    caches = (op.route, readers._wrapper)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(op, "_reported", set())
    yield
    for cached in caches:
        cached.cache_clear()


def pretend(monkeypatch, arch):
    """This process believes to be on a GPU of `arch`."""
    for module in (op, readers):
        monkeypatch.setattr(module, "num_sms", lambda index: contract.SMS[arch])
    monkeypatch.setattr(op, "current_arch", lambda: arch)
    whole = torch.zeros(WORKSPACE_BYTES + 128, dtype=torch.uint8)
    start = -whole.data_ptr() % 128
    monkeypatch.setattr(readers, "_workspace", lambda device: whole[start:][:WORKSPACE_BYTES])


@pytest.fixture
def blackwell(monkeypatch):
    """Makes this process a GPU whose launches are the contract's; returns their list."""

    def choose(arch, backend):
        launches = []
        pretend(monkeypatch, arch)
        if arch.startswith("sm_10"):
            contract.fake_sm100(monkeypatch, arch, launches)
        elif backend == "sparse":
            monkeypatch.setattr(op, "attention_kernel", lambda: "sparse")
            contract.fake_sm120_sparse(monkeypatch, arch, launches)
        else:
            contract.fake_sm120_cake(monkeypatch, arch, launches)
        return launches

    return choose


def test_the_record_is_the_one_of_flashinfers_headers():
    c = contract.record_constants()
    assert (WINDOW.nope_dim, WINDOW.rope_dim) == (c.nope, c.rope)
    assert WINDOW.num_scales == c.asserted["NUM_SCALES"] == c.nope // c.group
    assert (
        WINDOW.data_bytes == c.asserted["DATA_BYTES_PER_TOKEN"] == c.nope * c.bits // 8 + 2 * c.rope
    )
    assert WINDOW.record_bytes == c.asserted["BYTES_PER_TOKEN"]
    assert WINDOW.scale_bytes == -(-WINDOW.num_scales * c.scale_bytes // 16) * 16
    # Where rows lie in a page, and that its scales come after all of its data.
    assert "return row * DataBytes;" in c.footer
    assert "return page_size * DataBytes + row * ScaleBytes;" in c.footer
    assert re.search(r"PACKED_NOPE_BYTES = D_NOPE \* Encoding::BITS / 8", c.layout)
    for layout in (WINDOW, C128):
        for row in range(layout.page_size):
            assert layout.data_offset(row) == row * c.asserted["DATA_BYTES_PER_TOKEN"]
            assert layout.scale_offset(row) == (
                layout.page_size * c.asserted["DATA_BYTES_PER_TOKEN"] + row * WINDOW.scale_bytes
            )


def test_flashinfers_writer_has_the_nibbles_and_the_padding_in_the_same_place():
    quantise = contract.source(
        "include/flashinfer/attention/sparse_mla_sm120/compute/nvfp4_quantization.cuh"
    )
    assert "even index in the low nibble" in quantise
    writer = contract.source("csrc/sparse_mla_sm120/dsv4_nvfp4_cache_ops.cu")
    assert "data_output + kPackedNopeBytes + rope_lane * 32" in writer
    assert "*reinterpret_cast<uint32_t*>(scale_output + kNumScaleGroups) = 0;" in writer
    # Why that writer is not used: it rounds amax / 6 as ours, but from a bf16 latent, and it
    # multiplies by a reciprocal where the reference divides.
    assert "float_to_e4m3_byte(amax / 6.f)" in quantise
    assert "normalized[i] = values[i] * scale_inv" in quantise
    assert "latent_kv must have dtype bfloat16" in writer


@pytest.mark.parametrize("layout", [WINDOW, C128], ids=["page64", "page2"])
def test_bytes_that_we_write_are_the_values_that_flashinfers_headers_read(layout):
    records = pool(layout, 3, seed=1)
    slots = torch.arange(3 * layout.page_size)
    theirs = contract.decode(records, records.stride(0), layout.page_size, slots)
    # Every value is a product of a 2-bit and a 4-bit significand: exact in float32 as in float64.
    assert torch.equal(theirs, read_records(records, slots, layout).double())


def case(num_tokens, num_heads, comp, seed=0):
    """Arguments with hostile lists: holes, repeats, a token without keys, short lists; lengths."""
    rng = torch.Generator().manual_seed(seed)

    def slots(width, count):
        table = torch.randint(0, count, (num_tokens, width), generator=rng)
        table[torch.rand(num_tokens, width, generator=rng) < 0.3] = -1
        return table.int()

    q = torch.randn(num_tokens, num_heads, 512, generator=rng).bfloat16()
    window_slots = slots(128, 3 * 64)
    window_slots[0, :9] = 5
    sinks = torch.randn(num_heads, generator=rng)
    sinks[0], sinks[1] = -torch.inf, 60.0
    arguments = [q, window_slots, pool(WINDOW, 3, seed), WINDOW, None, None, None, sinks, 0.04]
    lengths = None
    if comp is not None:
        width, layout = comp
        pages = 9 if layout is C4 else 100
        listed = slots(width, pages * layout.page_size)
        lengths = torch.randint(0, width + 1, (num_tokens,), generator=rng).int()
        lengths[-1] = width
        # Beyond a token's length a list holds anything that is no slot of the pool.
        beyond = torch.arange(width) >= lengths[:, None]
        listed[beyond] = 1 << 30
        arguments[4:7] = listed, pool(layout, pages, seed + 1), layout
        if num_tokens > 2:
            window_slots[1], lengths[1] = -1, 0
    elif num_tokens > 2:
        window_slots[1] = -1
    return arguments, lengths


CASES = [
    pytest.param(arch, backend, heads, comp, id=f"{arch}-{backend}-{heads}-{name}")
    for arch, backend, heads in (
        ("sm_100a", "cake", 64),
        ("sm_100a", "cake", 8),
        ("sm_103a", "cake", 128),
        ("sm_120a", "sparse", 64),
        ("sm_121a", "sparse", 16),
        ("sm_120a", "cake", 8),
        ("sm_121a", "cake", 48),
    )
    for name, comp in (("window", None), ("csa", (512, C4)), ("hca", (130, C128)))
]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("arch", "backend"), [("sm_100a", "cake"), ("sm_120a", "cake")])
def test_the_output_is_turned_back_afterwards(blackwell, monkeypatch, arch, backend, with_lse):
    """By the standalone operation, whose reference stands in for it here; last, and once."""
    blackwell(arch, backend)
    monkeypatch.setattr(op, "inverse_rope", inverse_rope)
    arguments, lengths = case(3, 8, (130, C128))
    rotation = torch.tensor([4000, 0, 77]), build_rope_table(4096, 1e4)
    plain, plain_lse = op.sparse_attention(*arguments, 0.25, lengths, with_lse=with_lse)
    out, lse = op.sparse_attention(*arguments, 0.25, lengths, rotation, with_lse)
    assert torch.equal(out, inverse_rope(plain, *rotation))
    assert lse is plain_lse is None or torch.equal(lse, plain_lse)
    wanted, _ = reference(arguments[0].float(), *arguments[1:], 0.25, lengths, rotation)
    # The output is rounded before it is turned (twice with the log-sum-exp) and once after: each
    # half a unit of the pair's length at most, times |cos| + |sin| <= sqrt(2) for those before.
    length = wanted[..., 448:].unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True)
    bound = length.expand(-1, -1, -1, 2).flatten(-2) * ONE_ROUNDING * (1 + (1 + with_lse) * 2**0.5)
    assert ((out.float() - wanted)[..., 448:].abs() <= bound + 1e-6).all()
    assert not out[1].any()


@pytest.mark.parametrize(("arch", "backend", "heads", "comp"), CASES)
def test_the_operation_means_what_the_reference_means(blackwell, arch, backend, heads, comp):
    launches = blackwell(arch, backend)
    arguments, lengths = case(3, heads, comp)
    out_scale = 0.25
    wanted, wanted_lse = reference(
        arguments[0].float(), *arguments[1:], out_scale=out_scale, comp_lengths=lengths
    )
    for with_lse in (False, True):
        out, lse = op.sparse_attention(
            *arguments, out_scale=out_scale, comp_lengths=lengths, with_lse=with_lse
        )
        assert out.dtype is torch.bfloat16
        rounding = ONE_ROUNDING * (1 + with_lse)
        torch.testing.assert_close(out.float(), wanted, rtol=rounding, atol=1e-6)
        assert not out[1].any()
        if with_lse:
            # Float32 sums of at most 640 terms, and one product with log 2.
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
            assert (lse[1] == -torch.inf).all()
        else:
            assert lse is None
    assert launches


def test_lists_without_lengths_and_of_int64_are_taken_whole(blackwell):
    for arch, backend in (("sm_100a", "cake"), ("sm_120a", "cake")):
        blackwell(arch, backend)
        arguments, _ = case(2, 16, (130, C128))
        arguments[4] = arguments[4].masked_fill(arguments[4] == 1 << 30, -1)
        plain = [a.long() if i in (1, 4) else a for i, a in enumerate(arguments)]
        wanted, _ = reference(arguments[0].float(), *arguments[1:])
        out, _ = op.sparse_attention(*plain)
        torch.testing.assert_close(out.float(), wanted, rtol=ONE_ROUNDING, atol=1e-6)


def test_splits_are_merged_in_a_workspace_that_does_not_move(blackwell):
    """A captured graph keeps the addresses of its eager run; every shape works in one buffer."""
    launches = blackwell("sm_100a", "cake")
    addresses = set()
    for num_tokens in (1, 2, 5):
        arguments, lengths = case(num_tokens, 64, (512, C4))
        op.sparse_attention(*arguments, comp_lengths=lengths)
    for name, values in launches:
        if name == "nvfp4_merge":
            addresses.add(values["partial_O"].data_ptr())
    assert len(addresses) == 1
    launches = blackwell("sm_120a", "cake")
    for num_tokens in (1, 2, 3):
        arguments, lengths = case(num_tokens, 8, (512, C4))
        op.sparse_attention(*arguments, comp_lengths=lengths)
    split = [values for _, values in launches if values["splits"] > 1]
    assert split
    assert len({values["scratch"][0].data_ptr() for values in split}) == 1


def test_the_workspace_holds_every_plan_that_is_accepted():
    """Batches of decode and prefill, ranks of V4-Flash and V4-Pro, both compressed lists."""
    widths = ((0, 0), (512, 64), (1024, 64), (130, 2), (1408, 2))
    for arch in ("sm_100a", "sm_103a"):
        for heads in (8, 16, 32, 64, 128):
            for width, page in widths:
                for tokens in (1, 3, 16, 48, 64, 160, 200, 256, 320, 1024, 8192, 16384):
                    shape = CallShape(tokens, heads, 128, 64, width, page)
                    assert accepts(arch, shape, contract.SMS[arch]) is None, shape
                    layout = readers._sm100_workspace(shape, contract.SMS[arch])
                    assert layout.total_bytes <= WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("arch", "shape", "clause"),
    [
        ("sm_100a", CallShape(4, 48, 128, 64), "num_heads must be one of (8, 16, 32, 64, 128)"),
        ("sm_100a", CallShape(4, 64, 128, 64, 1409, 2), "total candidate tiles 13 exceeds"),
        ("sm_100a", CallShape(4, 64, 128, 48), "pages of [48] records, wanted powers of two"),
        ("sm_100a", CallShape(1 << 16, 64, 128, 64), f"wanted below {1 << 31}"),
        ("sm_120a", CallShape(4, 24, 128, 64), "cake: 24 heads, wanted one of [8, 16, 32, 48"),
        ("sm_120a", CallShape(4, 8, 128, 64, 1 << 15, 2), "cake: 514 chunks need at least 33"),
        ("sm_120a", CallShape(4096, 8, 128, 64, 8192, 2), "cake: a workspace of"),
        ("sm_90a", CallShape(4, 64, 128, 64), "FlashInfer has no NVFP4 reader for sm_90a"),
    ],
)
def test_what_is_refused_is_said(arch, shape, clause):
    assert clause in accepts(arch, shape, 148)


def test_sparse_serves_where_it_is_compiled_when_it_is_asked_for(monkeypatch):
    """Its numerics are beyond this project's limit, so the default is cake."""
    assert route("sm_120a", CallShape(4, 64, 128, 64), 188).reader.name == "cake"
    monkeypatch.setattr(op, "attention_kernel", lambda: "sparse")
    op.route.cache_clear()
    compiled = contract.instances()
    assert contract.extra_pages() >= {2, 64}
    for heads in (8, 16, 24, 32, 48, 64, 128):
        shape = CallShape(4, heads, 128, 64, 512, 64)
        if heads in readers.SPARSE_HEADS:
            assert (heads, 128) in compiled
            assert route("sm_120a", shape, 188).reader.name == "sparse"
        else:
            assert accepts("sm_120a", shape, 188).startswith(f"sparse: {heads} heads")
    for shape, clause in (
        (CallShape(4, 64, 64, 64), "64 window places, wanted one of [128, 512]"),
        (CallShape(4, 64, 128, 32), "window pages of 32, wanted 64"),
        (CallShape(4, 64, 128, 64, 512, 16), "compressed pages of 16, wanted one of [2, 32, 64]"),
    ):
        assert clause in accepts("sm_120a", shape, 188)
    assert "asks for sparse" in accepts("sm_100a", CallShape(4, 64, 128, 64), 148)


def test_the_line_of_the_log_names_the_reader_of_each_kind_of_layer():
    line = op.start_up_line("sm_100a", 64, 512, 148)
    assert line.startswith("Sparse attention on sm_100a, 64 heads a rank. window: FlashInfer cake.")
    assert "CSA: FlashInfer cake. HCA at 128K tokens: FlashInfer cake." in line
    assert "HCA at 1M tokens: our kernel (cake: total candidate tiles 65 exceeds" in line


@pytest.mark.parametrize("comp", [None, (130, C128)], ids=["window", "hca"])
def test_our_kernel_serves_what_flashinfer_refuses(monkeypatch, caplog, comp):
    """48 heads on sm_100: the same arguments, and one line of the log for each kind of layer."""
    pretend(monkeypatch, "sm_100a")
    calls = []
    monkeypatch.setattr(
        portable, "sparse_attention", lambda *args, **named: calls.append((args, named)) or "result"
    )
    arguments, lengths = case(2, 48, comp)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert op.sparse_attention(*arguments, 0.5, lengths, ROTATION) == "result"
    assert len(caplog.records) == 1
    assert "num_heads must be one of" in caplog.text
    args, named = calls[0]
    assert all(found is given for found, given in zip(args, [*arguments, 0.5], strict=True))
    assert named["comp_lengths"] is lengths and named["rotation"] is ROTATION


@pytest.mark.parametrize("what", ["bfloat16 records", "float32 query", "no token", "no window"])
def test_our_kernel_gets_what_no_reader_of_flashinfer_takes(monkeypatch, what):
    pretend(monkeypatch, "sm_100a")
    monkeypatch.setattr(portable, "sparse_attention", lambda *args, **named: "result")
    arguments, _ = case(2, 64, None)
    if what == "bfloat16 records":
        layout = RecordLayout(KVFormat.BFLOAT16, 64)
        arguments[2:4] = torch.zeros(3, layout.page_bytes, dtype=torch.uint8), layout
    elif what == "float32 query":
        arguments[0] = arguments[0].float()
    else:
        count = 0 if what == "no token" else 2
        arguments[0], arguments[1] = arguments[0][:count], arguments[1][:count, :0]
    assert op.sparse_attention(*arguments) == "result"


@pytest.mark.parametrize(
    ("arch", "heads", "message"),
    [
        ("sm_100a", 64, "device must be a cuda device"),
        ("sm_120a", 8, "q must be a contiguous CUDA bfloat16 tensor"),
    ],
)
def test_the_first_thing_that_flashinfer_misses_on_a_cpu_is_the_gpu(
    monkeypatch, arch, heads, message
):
    """Nothing of FlashInfer is replaced but its questions about the driver."""
    from flashinfer.mla._sparse_mla_sm120 import _cake_dsv4_nvfp4 as cake

    pretend(monkeypatch, arch)
    monkeypatch.setattr(cake, "_num_sms", lambda device: contract.SMS[arch])
    arguments, lengths = case(2, heads, (512, C4))
    with pytest.raises(ValueError, match=re.escape(message)):
        op.sparse_attention(*arguments, comp_lengths=lengths)


def test_flashinfers_sparse_asks_the_compiled_module_next(monkeypatch):
    """Its Python part takes our call; what fails is building the CUDA module."""
    from flashinfer.mla._sparse_mla_sm120 import _execution

    def built():
        raise RuntimeError("the CUDA module was asked for")

    pretend(monkeypatch, "sm_120a")
    monkeypatch.setattr(op, "attention_kernel", lambda: "sparse")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_execution, "get_sparse_mla_sm120_module", built)
    arguments, lengths = case(2, 64, (512, C4))
    with pytest.raises(ValueError, match="the CUDA module was asked for"):
        op.sparse_attention(*arguments, comp_lengths=lengths)


def test_another_release_no_compiler_or_a_wish_means_our_kernel(monkeypatch):
    monkeypatch.undo()
    fault = op._installation_fault.__wrapped__
    shape = CallShape(4, 64, 128, 64)
    monkeypatch.setattr(op, "version", lambda name: "0.7.1")
    assert fault() == "FlashInfer 0.7.1 is installed, wanted 0.7.2"
    monkeypatch.setattr(op, "version", lambda name: op.FLASHINFER)
    monkeypatch.setattr(op, "find_spec", lambda name: None)
    monkeypatch.setattr(op, "_compiler_exists", lambda: False)
    assert "no nvcc" in fault()
    monkeypatch.setattr(op, "_compiler_exists", lambda: True)
    assert fault() == ""
    monkeypatch.setattr(op, "_installation_fault", lambda: "FlashInfer is not installed")
    assert accepts("sm_100a", shape, 148) == "cake: FlashInfer is not installed"
    monkeypatch.setenv(ATTENTION_KERNEL.name, "portable")
    op.route.cache_clear()
    assert accepts("sm_100a", shape, 148) == f"{ATTENTION_KERNEL.name} asks for portable"


def test_the_pinned_release_is_the_one_that_was_read():
    from importlib.metadata import version

    assert version("flashinfer-python") == op.FLASHINFER
