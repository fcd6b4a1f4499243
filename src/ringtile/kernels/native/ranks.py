"""Scores of rounded queries and keys, and the best scores of rows, by the library: the calls of indexers."""

import torch
from torch import Tensor

from ringtile.kernels.contracts import with_contiguous_rows
from ringtile.kernels.native import run_items, threads_of
from ringtile.kernels.native.library import INT8, address, library

_QUERIES, _KEYS = 32, 1024
"""Queries and keys of an item of native/scores.h."""
_OPERATIONS_A_SCORE = 200.0
"""Work to rank a score, in operations of a product of matrices."""


def best(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the ``n`` best scores of rows and their int32 numbers, equal ones by their number, -1 for -inf."""
    scores, (rows, entries) = with_contiguous_rows(scores), scores.shape
    values = scores.new_empty(rows, n)
    numbers = scores.new_empty(rows, n, dtype=torch.int32)
    floats = [address("scores", x, torch.float32) for x in (scores, values)]
    threads, isa = threads_of(_OPERATIONS_A_SCORE * scores.numel()), library().choice.by_dtype[torch.float32].number
    sizes = min(threads, rows), rows, entries, scores.stride(0), n
    if library().handle.ringtile_best(isa, *sizes, *floats, address("numbers", numbers, torch.int32)):
        raise MemoryError("the native kernel could not allocate memory for its threads")
    return values, numbers


def rounded_scores(query: Tensor, of_query: Tensor, key: Tensor, of_key: Tensor, sums: Tensor, relu: bool) -> Tensor:
    """Return the float32 scores ``[rows, keys]`` of int8 queries ``[rows, heads, D]`` and keys, times their factors.

    D is a multiple of 4. Factors are ``[rows, heads]`` and ``[keys]``. ``sums`` has those of each key's numbers.
    """
    (rows, heads, head_dim), n_keys = query.shape, len(key)
    out = query.new_empty(rows, n_keys, dtype=torch.float32)
    operations = 2.0 * heads * rows * n_keys * head_dim
    c = library().structure()
    # The set for bfloat16 has products of bytes, too.
    c.isa, c.threads = library().choice.by_dtype[torch.bfloat16].number, threads_of(operations)
    c.batch, c.heads, c.n_queries, c.kv_heads, c.n_keys, c.head_dim = 1, heads, rows, 1, n_keys, head_dim
    c.dtype, c.out_stride[2] = INT8, n_keys
    c.place(q=query.transpose(0, 1)[None], k=key[None, None])
    c.point(sums=out, query_scale=of_query.T.contiguous(), key_scale=of_key, key_sum=sums)
    c.relu = relu
    items = -(-rows // _QUERIES) * -(-n_keys // _KEYS)
    run_items(c, "ringtile_scores", items, operations)
    return out
