"""Draw the tiles of an index as text."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tiles(row: Tensor, col: Tensor, full: Tensor, n_rows: int, n_cols: int, width: int) -> str:
    """Draw tiles, a square of ``ceil(max(n_rows, n_cols) / width)`` of them as one character."""
    if not n_rows or not n_cols:
        return ""
    cell = -(-max(n_rows, n_cols) // width)
    high, wide = -(-n_rows // cell), -(-n_cols // cell)
    place = row // cell * wide + col // cell
    kept = torch.bincount(place, minlength=high * wide)
    whole = torch.bincount(place[full], minlength=high * wide)
    rows = torch.bincount(torch.arange(n_rows, device=row.device) // cell)
    cols = torch.bincount(torch.arange(n_cols, device=row.device) // cell)
    shade = (kept > 0).int() + (whole == torch.outer(rows, cols).flatten()).int()
    return "\n".join("".join("·▒█"[number] for number in line) for line in shade.view(high, wide).tolist())
