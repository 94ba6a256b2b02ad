"""FlashInfer's NVFP4 attention as its headers and documentation state it, in float64, and stand-ins
for its launches that compute exactly that.

Every byte constant is parsed from the installed package's sources, none is this project's.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import flashinfer
import torch

ROOT = Path(flashinfer.__file__).parent / "data"
MODEL = ROOT / "include" / "flashinfer" / "attention" / "sparse_mla_sm120" / "model"
SMS = {"sm_100a": 148, "sm_103a": 160, "sm_120a": 188, "sm_121a": 48}


def source(path):
    """Text of one of FlashInfer's C++ sources."""
    return (ROOT / path).read_text(encoding="utf-8")


def constant(path, name):
    """An integer constant of a header of the cache's data model."""
    found = re.findall(rf"constexpr int {name} = (\d+);", (MODEL / path).read_text("utf-8"))
    assert len(found) == 1, (path, name, found)
    return int(found[0])


def structure(text, name):
    """Body of a C++ struct."""
    return re.search(rf"struct {name}\b.*?\n\}};", text, re.DOTALL).group()


def record_constants():
    """Every number of the record, from `dsv4_geometry.cuh`, `kv_storage.cuh` and the layout."""
    storage = (MODEL / "kv_storage.cuh").read_text("utf-8")
    layout = (MODEL / "dsv4_nvfp4_layout.cuh").read_text("utf-8")
    spec = structure(storage, "E4m3G16ScaleSpec")
    asserted = dict(re.findall(r"static_assert\(Dsv4Nvfp4Layout::(\w+) == (\d+)\)", layout))
    return SimpleNamespace(
        nope=constant("dsv4_geometry.cuh", "D_NOPE"),
        rope=constant("dsv4_geometry.cuh", "D_ROPE"),
        bits=int(re.search(r"BITS = (\d+)", structure(storage, "E2m1Encoding")).group(1)),
        group=int(re.search(r"GROUP = (\d+)", spec).group(1)),
        scale_bytes=int(re.search(r"BYTES_PER_SCALE = (\d+)", spec).group(1)),
        asserted={name: int(value) for name, value in asserted.items()},
        footer=structure(storage, "FooterScaleLayout"),
        layout=layout,
    )


def decode(pages, page_stride, page_size, slots):
    """Records at slots, float64 [N, 512], from the flat bytes of a pool."""
    c = record_constants()
    data, scales = c.asserted["DATA_BYTES_PER_TOKEN"], c.asserted["NUM_SCALES"]
    footer = c.asserted["BYTES_PER_TOKEN"] - data
    page, row = slots // page_size, slots % page_size
    start = page * page_stride + row * data
    at = page * page_stride + page_size * data + row * footer
    flat = pages.flatten()
    packed_bytes = c.nope * c.bits // 8
    packed = flat[start[:, None] + torch.arange(packed_bytes)].long()
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes & 7]
    values = torch.where(codes > 7, -values, values)
    scale = flat[at[:, None] + torch.arange(scales)].view(torch.float8_e4m3fn).double()
    rope = flat[(start + packed_bytes)[:, None] + torch.arange(2 * c.rope)].view(torch.bfloat16)
    return torch.cat((values * scale.repeat_interleave(c.group, dim=1), rope.double()), dim=1)


def attention(q, tables, sinks, scale):
    """(out float64 [T, H, 512]; lse float64 [T, H], base 2, with the sink) token by token.

    tables: (flat pool, page stride, page size, indices [T, K], lengths [T] or None) of each cache.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for token in range(len(q)):
        keys = []
        for pool, stride, page_size, indices, lengths in tables:
            length = indices.shape[1] if lengths is None else max(0, int(lengths[token]))
            listed = indices[token, :length].long()
            keys.append(decode(pool, stride, page_size, listed[listed >= 0]))
        records = torch.cat(keys)
        scores = q[token].double() @ records.T * scale
        logits = scores
        if sinks is not None:
            logits = torch.cat((scores, sinks.double()[:, None]), dim=1)
        if logits.shape[1] == 0:
            continue
        total = logits.logsumexp(dim=1)
        lse[token] = total / math.log(2)
        weights = (scores - total[:, None]).exp().nan_to_num(0.0)
        out[token] = weights @ records
    return out, lse


def fake_sm100(monkeypatch, arch, launches):
    """Let FlashInfer's host code for sm_100 run on a CPU up to its launches, which `attention` is.

    launches: list that gets the name and the values of every launch.
    """
    from flashinfer.mla import _core, cake_dsv4

    capability = {"sm_100a": (10, 0), "sm_103a": (10, 3)}[arch]
    monkeypatch.setattr(_core, "get_compute_capability", lambda device: capability)
    monkeypatch.setattr(cake_dsv4, "_target_arch", lambda device: arch)
    monkeypatch.setattr(cake_dsv4, "_nvfp4_sm_count", lambda device: SMS[arch])

    def compute(values):
        tables = [(values, "main")] + ([(values, "extra")] if values["extra_width"] else [])
        out, lse = attention(
            values["Q"],
            [_sm100_table(values, name) for _, name in tables],
            values["sinks"] if values["has_sinks"] else None,
            float(values["bmm1_scale"]),
        )
        values["O"].copy_(out * float(values["bmm2_scale"]))
        values["lse_out"].view(lse.shape).copy_(lse * values["lse_scale"])

    def variant(self, name, *, grid, **overrides):
        launches.append((name, self.values))
        merges = name == cake_dsv4._NVFP4_VARIANT_MERGE
        return (lambda: None) if merges else lambda: compute(self.values)

    def run(*prepared):
        for launch in prepared:
            launch()

    monkeypatch.setattr(cake_dsv4._Launcher, "variant", variant)
    monkeypatch.setattr(cake_dsv4._Launcher, "run", staticmethod(run))


def _sm100_table(values, name):
    lengths = values[f"{name}_lengths"] if values[f"has_{name}_lengths"] else None
    return (
        values[f"{name}_cache"],
        values[f"{name}_page_stride"],
        1 << values[f"{name}_page_shift"],
        values[f"{name}_indices"],
        lengths,
    )


def _on_a_gpu(monkeypatch):
    """Tensors that say they are on a GPU, and a stream that is not being captured."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def fake_sm120_cake(monkeypatch, arch, launches):
    """The same for `cake` on sm_120: FlashInfer's checks and planners, with a stand-in module."""
    from flashinfer.mla._sparse_mla_sm120 import _cake_dsv4_nvfp4 as cake

    _on_a_gpu(monkeypatch)
    monkeypatch.setattr(cake, "_num_sms", lambda device: SMS[arch])

    def compute(name, args):
        q, pool, indices, extra, extra_indices, lengths, extra_lengths, sink, out, lse = args[:10]
        split = args[10:12] if name == "decode" else ()
        rest = args[10 + len(split) :]
        page, stride, extra_page, extra_stride = rest[:4]
        scale, lse_scale = (rest[7], rest[8]) if name == "decode" else (rest[5], rest[6])
        tables = [(pool, stride, page, indices, lengths)]
        if extra is not None:
            tables.append((extra, extra_stride, extra_page, extra_indices, extra_lengths))
        values, sums = attention(q, tables, sink, scale)
        out.copy_(values)
        lse.copy_(sums * lse_scale)
        launches.append((name, {"splits": rest[4] if split else 1, "scratch": split}))

    module = SimpleNamespace(
        decode=lambda *args: compute("decode", args),
        prefill=lambda *args: compute("prefill", args),
    )
    monkeypatch.setattr(cake, "get_cake_sparse_mla_sm120_dsv4_nvfp4_module", lambda: module)


def fake_sm120_sparse(monkeypatch, arch, launches):
    """The same for `sparse`: its checks are compiled, so `checked` restates the ones it states."""
    from flashinfer.mla._sparse_mla_sm120 import _prepared

    _on_a_gpu(monkeypatch)
    monkeypatch.setattr(_prepared.calibration, "refresh_store", lambda: None)
    monkeypatch.setattr(_prepared, "tuning_enabled", lambda nvfp4: False)

    def execute(plan, q, pool, indices, mid, mlse, out, lse, scale, *rest):
        lengths, sink, extra, extra_indices, extra_lengths, lse_scale = rest
        tables = [(pool, pool.stride(0), pool.shape[1], indices, lengths)]
        if extra is not None:
            table = (extra, extra.stride(0), extra.shape[1], extra_indices, extra_lengths)
            tables.append(table)
        values, sums = attention(q, tables, sink, scale)
        out.copy_(values)
        lse.copy_(sums * lse_scale)
        launches.append(("sparse", {}))

    def prepare(metadata, device, precision, nvfp4, preference, **owned):
        none = ((0,), torch.bfloat16, 0, 16)
        call = _prepared.PreparedCall(None, execute, _prepared.calibration._constants_version, ())
        return _prepared.replace(call, workspace=(none, none, none))

    monkeypatch.setattr(_prepared, "validate_metadata", checked)
    monkeypatch.setattr(_prepared, "prepare", prepare)


def instances():
    """(heads, window places) that `sparse` is compiled for: attention_dispatch.h."""
    text = source("csrc/sparse_mla_sm120/attention_dispatch.h")
    macro = re.search(r"NVFP4_INSTANCES\(F\) \\\n(.*?)\n\n", text, re.DOTALL).group(1)
    return {(int(h), int(k)) for h, k in re.findall(r"F\((\d+), (\d+)\)", macro)}


def extra_pages():
    """Page sizes of the extra cache that `sparse` is compiled for: attention_plan.h."""
    path = "include/flashinfer/attention/sparse_mla_sm120/execution/attention_plan.h"
    macro = re.search(r"SPARSE_MLA_EXTRA_PAGES\(F\) (.*)", source(path)).group(1)
    return {int(page) for page in re.findall(r"F\((\d+)\)", macro)}


def checked(*tensors, model, is_dsv4_nvfp4, extra_fp4, value_dim):
    """`inspect_attention_metadata` of attention_validation.h, for what this project passes."""
    q, pool, indices, out, lengths, sink, extra, extra_indices, extra_lengths, lse = tensors[:10]
    tokens, heads, width = q.shape
    assert is_dsv4_nvfp4 and model == 1 and not extra_fp4 and value_dim == width == 512
    assert q.dtype is out.dtype is torch.bfloat16 and q.is_contiguous() and out.is_contiguous()
    assert out.shape == q.shape and (heads, indices.shape[1]) in instances()
    for table in (indices, extra_indices):
        assert table is None or (table.dtype is torch.int32 and table.is_contiguous())
        assert table is None or (table.shape[0] == tokens and table.shape[1] > 0)
    for vector, count, dtype in (
        (lengths, tokens, torch.int32),
        (extra_lengths, tokens, torch.int32),
        (sink, heads, torch.float32),
    ):
        assert vector is None or (vector.dtype is dtype and vector.shape == (count,))
    assert (extra is None) is (extra_indices is None)
    assert extra_lengths is None or extra is not None
    for cache in (pool, extra):
        if cache is not None:
            assert cache.dtype is torch.uint8 and cache.ndim == 3 and cache.shape[2] == 384
            assert cache.stride()[1:] == (384, 1) and cache.stride(0) % 16 == 0
            assert cache.stride(0) >= cache.shape[1] * 384 and cache.data_ptr() % 16 == 0
    assert extra is None or extra.shape[1] in extra_pages()
    assert lse.shape == (tokens, heads) and lse.is_contiguous() and lse.dtype is torch.float32
