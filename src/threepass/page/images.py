"""Small PNG images as data URIs, without an imaging library."""

import base64
import struct
import zlib

import torch
from torch import Tensor

# black, violet, red, orange, pale yellow: rising in lightness, so that it reads without colour too
HEAT = ((0, 0, 4), (66, 10, 104), (147, 38, 103), (221, 81, 58), (252, 165, 10), (252, 255, 164))


def png(image: Tensor) -> bytes:
    """A PNG file of an H x W x 3 uint8 image.

    >>> png(torch.zeros(2, 3, 3, dtype=torch.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, _ = image.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in image)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def data_uri(image: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def picture(x: Tensor) -> Tensor:
    """C x H x W pixels, 0 to 1, as H x W x 3 uint8: grey, or the first three channels."""
    x = x[:3] if len(x) >= 3 else x[:1].expand(3, -1, -1)
    return (x.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1)


def heat(values: Tensor, top: float) -> Tensor:
    """H x W numbers from 0 to top as colours."""
    stops = torch.tensor(HEAT, dtype=torch.float64)
    place = (values.double() / (top or 1)).clamp(0, 1) * (len(HEAT) - 1)
    left = place.floor().clamp(max=len(HEAT) - 2).long()
    mix = (place - left)[..., None]
    return (stops[left] * (1 - mix) + stops[left + 1] * mix).round().to(torch.uint8)
