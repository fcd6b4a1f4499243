"""Lists of keys as kernels take them, from a rule with `Chosen`: sorted, each once, and cut by the rest of the rule."""

from itertools import product

import torch
from torch import Tensor

from ringtile.functional.tensors import is_real
from ringtile.index.build import check_counts
from ringtile.kernels.contracts import Lists
from ringtile.kernels.native.library import reason_against
from ringtile.kernels.native.lists import ascending
from ringtile.patterns.base import And, Pattern, TileGrid
from ringtile.patterns.chosen import Split
from ringtile.patterns.facts import key_bounds

_ENTRIES = 1 << 20
"""Most entries that are sorted or judged at once, unless one query has more, and most numbers that bits sort."""


def check_lists(found: Split, query: Tensor, key: Tensor, start: int | None, n_keys: int) -> None:
    """Raise ValueError if lists do not match a call, or if they name a key that does not exist."""
    indices, block = found.chosen.indices, found.chosen.block
    (batch, heads, n_queries), key_heads = query.shape[:3], key.shape[1]
    of_batch, groups, rows, _ = indices.shape
    if of_batch not in (1, batch) or groups not in (1, key_heads) or rows != n_queries:
        raise ValueError(
            f"indices: expected [1 or {batch}, 1 or {key_heads}, {n_queries}, n], got {indices.shape=} with "
            f"{query.shape=}, {key.shape=}"
        )
    if indices.device != query.device:
        raise ValueError(f"indices: expected the query's device {query.device}, got {indices.device}")
    # On a GPU, or in a graph, reading the values would synchronize or fail.
    if indices.device.type == "cpu" and is_real(indices) and indices.numel():
        entries = -(-n_keys // block)
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= entries:
            raise ValueError(
                f"indices: expected -1 or numbers below {entries} ({n_keys} keys, {block=}), "
                f"got {least if least < -1 else most}"
            )
    rule = found.beside if start is None else found.rule(start, heads)
    if not torch.compiler.is_compiling():
        check_counts(rule, heads, max(batch, 1))
        rule.validate(TileGrid(1, 0, n_keys, n_keys) if start is None else TileGrid(1, start, n_queries, n_keys))


@torch.no_grad()
def lists_of(
    found: Split, query: Tensor, key: Tensor, at: Tensor, key_mask: Tensor | None, key_lengths: Tensor | None
) -> Lists:
    """Return the lists of a call, whose queries are at positions ``at``."""
    (batch, heads, n_queries), (key_heads, n_keys) = query.shape[:3], key.shape[1:3]
    lo, hi = torch.zeros_like(at), torch.full_like(at, n_keys)
    filters = []
    for rule in _conjuncts(found.listed):
        bounds = [key_bounds(rule.batch_row(b), at, n_keys) for b in range(rule.batch_size or 1)]
        each = [pair for pair in bounds if pair is not None]
        if len(each) < len(bounds):
            filters.append(rule)
            continue
        lows, highs = zip(*each, strict=True)
        lo, hi = torch.maximum(lo, torch.stack(lows)), torch.minimum(hi, torch.stack(highs))
    if key_lengths is not None:
        hi = torch.minimum(hi, key_lengths.unsqueeze(1))
    if key_mask is not None and key_mask.device.type == "cpu" and is_real(key_mask) and n_keys:
        # Padding is at one end or both, as a rule.
        if (inside := interval_of(key_mask)) is not None:
            lo, hi, key_mask = torch.maximum(lo, inside[0]), torch.minimum(hi, inside[1]), None
    lo, hi = (x if x.dim() == 2 else x.unsqueeze(0) for x in (lo, hi))
    limits = torch.stack(torch.broadcast_tensors(lo, hi), 2).clamp(0, n_keys).int()
    # Without keys, no number is valid.
    indices, block = found.chosen.indices if n_keys else found.chosen.indices[..., :0], found.chosen.block
    judged = bool(filters) or key_mask is not None
    lists = _lists_of_heads(filters, heads, indices.shape[1], key_heads)
    if judged:
        of_batch = batch if key_mask is not None or any(rule.batch_size for rule in filters) else -1
        indices = indices.expand(of_batch, -1 if len(lists) == indices.shape[1] else len(lists), -1, -1)
    per_query = indices.shape[0] * indices.shape[1] * indices.shape[3] * (block if judged else 1)
    step, found_rows = max(1, _ENTRIES // max(per_query, 1)), []
    for begin in range(0, max(n_queries, 1), step):
        rows = indices[:, :, begin : begin + step]
        if judged:
            rows = _filtered(rows, block, at[begin : begin + step], n_keys, filters, lists, key_mask)
        found_rows.append(_ascending(rows, n_keys if judged else -(-n_keys // block)))
    return Lists(torch.cat(found_rows, 2).contiguous(), 1 if judged else block, limits.contiguous())


def interval_of(key_mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first key of each row of a mask ``[B, Nk]`` and the end of its keys, or None if one has a gap."""
    first, size = key_mask.int().argmax(1, keepdim=True), key_mask.sum(1, keepdim=True)
    number = torch.arange(key_mask.shape[1], device=key_mask.device)
    has_gap = not torch.equal(key_mask, (number >= first) & (number < first + size))
    return None if has_gap else (first, first + size)


def _conjuncts(rule: Pattern) -> list[Pattern]:
    """Return the rules that a rule joins by ``&``."""
    return [each for part in rule.parts for each in _conjuncts(part)] if isinstance(rule, And) else [rule]


def _lists_of_heads(filters: list[Pattern], heads: int, groups: int, key_heads: int) -> list[int]:
    """Return a head of each list, as many lists as the filters need. Raise ValueError if its heads need several."""
    kinds = [tuple(rule.head_class(head) for rule in filters) for head in range(heads)]
    for count in (groups, key_heads):
        size = heads // count
        if all(kinds[head] == kinds[head // size * size] for head in range(heads)):
            return list(range(0, heads, size))
    raise ValueError(
        "pattern: expected a rule that is the same for all query heads of a key head, to join it with Chosen, got one "
        "by query head, as Elements counts: repeat the keys and values, or use backend='reference'"
    )


def _filtered(
    entries: Tensor, block: int, at: Tensor, n_keys: int, filters: list[Pattern], lists: list[int], mask: Tensor | None
) -> Tensor:
    """Return the keys ``[B, G, c, n * block]`` of entries that all filters keep, and -1 elsewhere."""
    # The keys of -1 are negative for any block.
    tokens = (entries.long().unsqueeze(4) * block + torch.arange(block, device=at.device)).flatten(3)
    if not tokens.numel():
        return tokens
    keep, inside = (tokens >= 0) & (tokens < n_keys), tokens.clamp(0, n_keys - 1)
    for rule in filters:
        kept = [
            rule.batch_row(b).allowed(
                torch.tensor(lists[g], dtype=torch.int64, device=at.device), at.unsqueeze(1), inside[b, g]
            )
            for b, g in product(range(tokens.shape[0]), range(len(lists)))
        ]
        keep = keep & torch.stack(kept).unflatten(0, (-1, len(lists)))
    if mask is not None:
        keep = keep & mask[:, None, None].expand(*inside.shape[:3], -1).gather(3, inside)
    return torch.where(keep, tokens, -1)


def _ascending(entries: Tensor, count: int) -> Tensor:
    """Return the entries in [0, count) of each row as int32, ascending and each once, then -1."""
    if is_real(entries) and entries.is_cpu and count <= _ENTRIES and not reason_against():
        return ascending(entries, count)
    entries = torch.where((entries >= 0) & (entries < count), entries, count).int().sort(3).values
    # The places of what a row does not keep, or has before, are behind its end.
    keep = (torch.nn.functional.pad(entries, (1, 0), value=-1)[..., :-1] != entries) & (entries < count)
    place = torch.where(keep, keep.cumsum(3) - 1, entries.shape[3])
    room = entries.new_full((*entries.shape[:3], entries.shape[3] + 1), -1)
    return room.scatter(3, place, entries)[..., :-1]
