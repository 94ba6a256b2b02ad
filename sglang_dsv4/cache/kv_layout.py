"""The only home of byte offsets: where one latent record or indexer key lies inside a paged pool.

A pool is a uint8 tensor [num_pages, page_bytes]. A flat slot id names one token:
page = slot // page_size, row = slot % page_size; slot -1 means unused.

NVFP4 latent record, 384 bytes a token (the DSV4 NVFP4 ABI of FlashInfer 0.7.2,
`Dsv4Nvfp4Layout`): a page holds page_size x 352 data bytes, then page_size x 32 scale bytes.

    data  0..223    448 NoPE values, e2m1, even index in the low nibble
    data  224..351  64 RoPE values, bf16
    scale 0..27     28 e4m3 block scales, one for 16 values
    scale 28..31    zero

FP4 indexer key, 68 bytes (stock SGLang's FP4 indexer page): a page holds page_size x 64 bytes of
e2m1, then page_size x 4 UE8M0 scales, one for 32 values.

The bfloat16 format keeps rows of bf16: 1024 bytes for a record, 256 for an indexer key.
"""

from dataclasses import dataclass
from enum import StrEnum

from sglang_dsv4.errors import UnsupportedError

NVFP4_GROUP = 16
INDEXER_GROUP = 32
FORMAT_VERSION = "dsv4-kv-1"


class KVFormat(StrEnum):
    """How a pool stores its values; the names are those of `--kv-cache-dtype`."""

    NVFP4 = "nvfp4"
    BFLOAT16 = "bfloat16"

    @classmethod
    def from_option(cls, name: str) -> "KVFormat":
        """The format that `--kv-cache-dtype` asks for; auto is NVFP4, bf16 is bfloat16.

        Raises UnsupportedError for another name.
        """
        try:
            return cls({"auto": "nvfp4", "bf16": "bfloat16"}.get(name, name))
        except ValueError:
            raise UnsupportedError(
                f"--kv-cache-dtype is {name}, wanted {' or '.join(cls)} for this model: leave the "
                "option out for nvfp4."
            ) from None


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"found page_size {page_size}, wanted at least 1: give tokens per page")


@dataclass(frozen=True)
class RecordLayout:
    """Bytes of one latent record (NoPE then RoPE) in a page of `page_size` tokens.

    Raises ValueError for a page size below 1 or a NoPE width that is no multiple of 16.
    """

    format: KVFormat
    page_size: int
    nope_dim: int = 448
    rope_dim: int = 64

    def __post_init__(self) -> None:
        _check_page_size(self.page_size)
        if self.nope_dim % NVFP4_GROUP:
            raise ValueError(
                f"found nope_dim {self.nope_dim}, wanted a multiple of {NVFP4_GROUP}: "
                "choose a width that fills its scale groups"
            )

    @property
    def head_dim(self) -> int:
        """Values of a record."""
        return self.nope_dim + self.rope_dim

    @property
    def nope_bytes(self) -> int:
        """Bytes of the NoPE values inside the data part."""
        return self.nope_dim // 2 if self.format is KVFormat.NVFP4 else 2 * self.nope_dim

    @property
    def data_bytes(self) -> int:
        """Bytes of a record's data part: 352 or 1024."""
        return self.nope_bytes + 2 * self.rope_dim

    @property
    def num_scales(self) -> int:
        """Block scales of a record: 28 or 0."""
        return self.nope_dim // NVFP4_GROUP if self.format is KVFormat.NVFP4 else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a record's scale part, padded to 16: 32 or 0."""
        return -(-self.num_scales // 16) * 16

    @property
    def record_bytes(self) -> int:
        """Bytes of a record: 384 or 1024."""
        return self.data_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; pages are packed without padding."""
        return self.page_size * self.record_bytes

    def data_offset(self, slot_in_page: int) -> int:
        """Offset in its page of a record's data part."""
        return slot_in_page * self.data_bytes

    def scale_offset(self, slot_in_page: int) -> int:
        """Offset in its page of a record's scale part (NVFP4 only)."""
        return self.page_size * self.data_bytes + slot_in_page * self.scale_bytes

    @property
    def tag(self) -> str:
        """Names the byte map wherever pages leave the process (HiCache, PD)."""
        return f"{FORMAT_VERSION}:{self.format.value}:{self.nope_dim}+{self.rope_dim}" + (
            f":{self.record_bytes}B:page{self.page_size}"
        )


@dataclass(frozen=True)
class IndexerLayout:
    """Bytes of one indexer key in a page of `page_size` keys; NVFP4 here means e2m1 with UE8M0.

    Raises ValueError for a page size below 1 or a width that is no multiple of 32.
    """

    format: KVFormat
    page_size: int
    head_dim: int = 128

    def __post_init__(self) -> None:
        _check_page_size(self.page_size)
        if self.head_dim % INDEXER_GROUP:
            raise ValueError(
                f"found head_dim {self.head_dim}, wanted a multiple of {INDEXER_GROUP}: "
                "choose a width that fills its scale groups"
            )

    @property
    def data_bytes(self) -> int:
        """Bytes of a key's values: 64 or 256."""
        return self.head_dim // 2 if self.format is KVFormat.NVFP4 else 2 * self.head_dim

    @property
    def scale_bytes(self) -> int:
        """Bytes of a key's scales: 4 or 0."""
        return self.head_dim // INDEXER_GROUP if self.format is KVFormat.NVFP4 else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of a key: 68 or 256."""
        return self.data_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; pages are packed without padding."""
        return self.page_size * self.record_bytes

    def data_offset(self, slot_in_page: int) -> int:
        """Offset in its page of a key's values."""
        return slot_in_page * self.data_bytes

    def scale_offset(self, slot_in_page: int) -> int:
        """Offset in its page of a key's scales (NVFP4 only)."""
        return self.page_size * self.data_bytes + slot_in_page * self.scale_bytes

    @property
    def tag(self) -> str:
        """Names the byte map wherever pages leave the process (HiCache, PD)."""
        return f"{FORMAT_VERSION}:indexer-{self.format.value}:{self.head_dim}" + (
            f":{self.record_bytes}B:page{self.page_size}"
        )
