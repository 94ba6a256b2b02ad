"""Byte offsets of the pools."""

import pytest

from sglang_dsv4.cache.kv_layout import IndexerLayout, KVFormat, RecordLayout

SIZES = [
    (RecordLayout(KVFormat.NVFP4, 64), 352, 32, 384),
    (RecordLayout(KVFormat.BFLOAT16, 64), 1024, 0, 1024),
    (IndexerLayout(KVFormat.NVFP4, 64), 64, 4, 68),
    (IndexerLayout(KVFormat.BFLOAT16, 64), 256, 0, 256),
]


@pytest.mark.parametrize(("layout", "data", "scale", "record"), SIZES)
def test_sizes(layout, data, scale, record):
    assert (layout.data_bytes, layout.scale_bytes, layout.record_bytes) == (data, scale, record)
    assert layout.page_bytes == 64 * record


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
@pytest.mark.parametrize("make", [RecordLayout, IndexerLayout])
@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_the_parts_of_all_rows_fill_a_page_exactly(make, kv_format, page_size):
    layout = make(kv_format, page_size)
    used = []
    for row in range(page_size):
        used += range(layout.data_offset(row), layout.data_offset(row) + layout.data_bytes)
        used += range(layout.scale_offset(row), layout.scale_offset(row) + layout.scale_bytes)
    assert sorted(used) == list(range(layout.page_bytes))


def test_scales_follow_the_data_of_the_whole_page():
    layout = RecordLayout(KVFormat.NVFP4, 64)
    assert layout.data_offset(3) == 3 * 352
    assert layout.scale_offset(0) == 64 * 352
    assert layout.scale_offset(3) == 64 * 352 + 3 * 32
    assert IndexerLayout(KVFormat.NVFP4, 64).scale_offset(3) == 64 * 64 + 3 * 4


def test_tags_name_every_difference():
    layouts = [
        make(kv_format, page_size)
        for make in (RecordLayout, IndexerLayout)
        for kv_format in KVFormat
        for page_size in (2, 64)
    ]
    layouts.append(RecordLayout(KVFormat.NVFP4, 64, nope_dim=64))
    assert len({layout.tag for layout in layouts}) == len(layouts)


def test_format_names_are_the_command_line_values():
    assert [kv_format.value for kv_format in KVFormat] == ["nvfp4", "bfloat16"]
    assert KVFormat("nvfp4") is KVFormat.NVFP4


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="page_size 0"):
        RecordLayout(KVFormat.NVFP4, 0)
    with pytest.raises(ValueError, match="page_size 0"):
        IndexerLayout(KVFormat.NVFP4, 0)
    with pytest.raises(ValueError, match="multiple of 16"):
        RecordLayout(KVFormat.NVFP4, 64, nope_dim=40)
    with pytest.raises(ValueError, match="multiple of 32"):
        IndexerLayout(KVFormat.NVFP4, 64, head_dim=48)
