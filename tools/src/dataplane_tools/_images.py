"""Small pictures of cells that are images. Needs Pillow."""

from __future__ import annotations

import io
from typing import Any, Final

from dataplane_tools._sample import shape_of

_MOST_PIXELS: Final = 256


def describe_image(cell: Any) -> str:
    """What an image is, in words."""
    return f"an image of {len(cell)} bytes" if isinstance(cell, bytes) else f"an image, {shape_of(cell)}"


def thumbnail(cell: Any) -> bytes | None:
    """A PNG of at most 256 pixels in width and height. None: there is no Pillow, or it cannot read the cell.

    Args:
        cell: A uint8 tensor (H, W, C) or (C, H, W) of 1, 3 or 4 channels, or the bytes of a file.
    """
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        if isinstance(cell, bytes):
            image: Image.Image = Image.open(io.BytesIO(cell), formats=("PNG", "JPEG", "GIF", "WEBP"))
        else:
            pixels = (cell if cell.shape[-1] in (1, 3, 4) else cell.permute(1, 2, 0)).contiguous().numpy()
            image = Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels)
        image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
        written = io.BytesIO()
        image.convert("RGBA").save(written, "PNG")
    except Exception:  # a file that is damaged, or has too many pixels: whatever Pillow says of it
        return None
    return written.getvalue()
