"""`torch.sparse` as a baseline of `benchmarks/suites.py`."""

import warnings

import torch
from torch import Tensor

from ringtile.tools.bench.peers import MASK_PAIRS, Attention, Case, Peer

SPARSE_PAIRS = 1 << 20
"""The most pairs for `torch.sparse`, which takes about 3 microseconds per kept pair, forward and backward."""


class TorchSparse(Peer):
    """`torch.sparse` in CSR form, one head at a time: sampled matmul, softmax over the entries of a row, matmul."""

    name = "torch.sparse"

    def unsupported(self, case: Case) -> list[str]:
        reasons = []
        kept = case.index.kept_pairs * (case.batch * case.heads // case.index.group.numel())
        if kept > SPARSE_PAIRS:
            reasons.append(f"keeps {kept:,} pairs over all heads, timed up to {SPARSE_PAIRS:,}")
        if case.index.n_groups * case.queries * case.n_tokens > MASK_PAIRS:
            reasons.append(f"reads its entries from a dense mask of up to {MASK_PAIRS:,} pairs")
        if case.dtype not in (torch.float32, torch.float64):
            reasons.append(f"its sampled matmul supports float32 and float64, got {case.dtype}")
        return reasons

    def prepare(self, case: Case) -> Attention:
        kept = case.index.to_dense().expand(case.batch, case.heads, -1, -1).flatten(0, 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            entries = [mask.to(case.dtype).to_sparse_csr() for mask in kept]
        rows = [mask.nonzero()[:, 0] for mask in kept]
        groups = case.heads // case.key_heads

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
            heads = zip(entries, rows, *(x.flatten(0, 1) for x in (q, k, v)), strict=True)
            with torch.sparse.check_sparse_tensor_invariants(False):
                return torch.stack([_csr_attention(*head) for head in heads]).view_as(q)

        return run


def _csr_attention(csr: Tensor, row: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sampled = torch.sparse.sampled_addmm(csr, q, k.mT, beta=0.0, alpha=q.shape[-1] ** -0.5)
    scores = sampled.values()
    # A softmax of each row's entries: they are a flat list, so rows are reduced by their numbers.
    highest = scores.new_full((len(q),), -torch.inf).scatter_reduce(0, row, scores.detach(), "amax")
    weights = (scores - highest[row]).exp()
    total = weights.new_zeros(len(q)).index_add(0, row, weights)
    share = torch.sparse_csr_tensor(csr.crow_indices(), csr.col_indices(), weights / total[row], csr.shape)
    return share @ v
