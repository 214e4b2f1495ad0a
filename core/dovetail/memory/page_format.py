"""Write pages of a KV store to bytes and read them back, for stores whose memory consists of tensors.

    magic | version of this format | length of the header | checksum | length of the content | header | content

The header is JSON: the ``PageLayout`` and the number of pages. The content has the pages of one part after the other. The
checksum is the CRC-32 of header and content.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec
import torch

from dovetail.errors import PageFormatError
from dovetail.interfaces.store import PageLayout
from dovetail.ops.kv_dtypes import raw

MAGIC = b"DTKV"
VERSION = 1
_START = struct.Struct("<4sHIIQ")


class _Header(msgspec.Struct, frozen=True):
    layout: PageLayout
    pages: int


def layout_of(store: str, version: int, parts: Sequence[torch.Tensor], scales: int = 0) -> PageLayout:
    """Return the layout of pages whose content is that of ``parts``, each ``[num_pages, ...]``."""
    shapes = tuple((str(part.dtype).removeprefix("torch."), tuple(part.shape[1:])) for part in parts)
    return PageLayout(store, version, shapes, scales)


def export_parts(layout: PageLayout, parts: Sequence[torch.Tensor], pages: Sequence[int]) -> bytes:
    """Return the ``pages`` of all ``parts`` (``[num_pages, ...]`` each) as bytes."""
    index = torch.tensor(pages, dtype=torch.int64, device=parts[0].device)
    header = msgspec.json.encode(_Header(layout, len(pages)))
    content = b"".join(_bytes(raw(part).index_select(0, index)) for part in parts)
    checksum = zlib.crc32(content, zlib.crc32(header))
    return _START.pack(MAGIC, VERSION, len(header), checksum, len(content)) + header + content


def import_parts(layout: PageLayout, parts: Sequence[torch.Tensor], data: bytes, pages: Sequence[int]) -> None:
    """Write an export to the ``pages`` of all ``parts``. Raises ``PageFormatError`` before anything is written."""
    sizes = [len(pages) * part[0].numel() * part.dtype.itemsize for part in parts]
    content = _checked(layout, data, len(pages), sum(sizes))
    index = torch.tensor(pages, dtype=torch.int64, device=parts[0].device)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        own = raw(part)
        if size:
            given = torch.frombuffer(bytearray(content[start : start + size]), dtype=own.dtype)
            own.index_copy_(0, index, given.view(len(pages), *own.shape[1:]).to(own.device))
        start += size


def _checked(layout: PageLayout, data: bytes, count: int, nbytes: int) -> memoryview:
    """Return the content of an export that has ``layout`` and ``count`` pages, which take ``nbytes``. Raises
    ``PageFormatError``."""
    if len(data) < _START.size:
        raise PageFormatError("truncated", f"the export has {len(data)} bytes; it begins with {_START.size}")
    magic, version, header_size, checksum, size = _START.unpack_from(data)
    if magic != MAGIC:
        raise PageFormatError("magic", f"the data begins with {magic!r}; exported pages begin with {MAGIC!r}")
    if version != VERSION:
        raise PageFormatError("version", f"the export has version {version} of the format; this engine reads {VERSION}")
    expected = _START.size + header_size + size
    if len(data) != expected:
        raise PageFormatError("truncated", f"the export has {len(data)} bytes; its header announces {expected}")
    rest = memoryview(data)[_START.size :]
    if zlib.crc32(rest) != checksum:
        raise PageFormatError("checksum", "the checksum of the export is wrong: it was changed after it was written")
    try:
        header = msgspec.json.decode(rest[:header_size], type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PageFormatError("header", f"the header of the export cannot be read: {error}") from error
    if header.layout != layout:
        raise PageFormatError(
            "layout", f"the pages were written as {_text(header.layout)}; this store has {_text(layout)}"
        )
    if header.pages != count:
        raise PageFormatError("pages", f"the export has {header.pages} pages; {count} are to be written")
    if size != nbytes:
        raise PageFormatError("size", f"the content of the export has {size} bytes; {count} pages take {nbytes}")
    return rest[header_size:]


def _text(layout: PageLayout) -> str:
    kinds = ", ".join(dict.fromkeys(f"{dtype} {list(shape)}" for dtype, shape in layout.parts))
    scales = f", scales {layout.scales:08x}" if layout.scales else ""
    return f"{layout.store} version {layout.version}, {len(layout.parts)} parts of {kinds}{scales}"


def _bytes(part: torch.Tensor) -> bytes:
    return part.contiguous().cpu().view(torch.uint8).numpy().tobytes() if part.numel() else b""
