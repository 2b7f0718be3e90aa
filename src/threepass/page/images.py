"""Small PNG images as data URIs."""

import base64
import io

import torch
from PIL import Image
from torch import Tensor

# black, violet, red, orange, pale yellow: rising in lightness, so that it reads without colour too
HEAT = ((0, 0, 4), (66, 10, 104), (147, 38, 103), (221, 81, 58), (252, 165, 10), (252, 255, 164))


def data_uri(image: Tensor) -> str:
    """An H x W x 3 uint8 image as a PNG file in a data URI.

    >>> data_uri(torch.zeros(2, 3, 3, dtype=torch.uint8))[:26]
    'data:image/png;base64,iVBO'
    """
    file = io.BytesIO()
    Image.fromarray(image.numpy()).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


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
