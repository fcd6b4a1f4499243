"""Train on short documents packed into one row, without padding: no document attends to another.

The documents are the paragraphs of Python's manual.

    python examples/pack_documents.py --tokens 8192 --steps 50
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from train_window import read_bytes

from ringtile import SparseLanguageModel, SparseTransformer
from ringtile.patterns import Documents

LAST = -100  # the target of the last token of a document, which cross_entropy ignores


def pack(documents: list[bytes], tokens: int) -> tuple[Tensor, Tensor, list[int]]:
    """Draw documents until the row is full. Returns the row, its targets and the lengths of the documents."""
    row: list[int] = []
    targets: list[int] = []
    lengths = []
    while True:
        document = documents[int(torch.randint(len(documents), ()))][: tokens // 2]
        if len(row) + len(document) > tokens:
            return torch.tensor([row]), torch.tensor(targets), lengths
        row += document
        targets += [*document[1:], LAST]
        lengths.append(len(document))


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="per row")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    documents = [paragraph for paragraph in read_bytes(None).split(b"\n\n") if len(paragraph) > 1]

    model = SparseLanguageModel(256, SparseTransformer(2, 128, 4, is_causal=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        row, targets, lengths = pack(documents, args.tokens)
        for layer in model.transformer.layers:
            layer.pattern = Documents(lengths)
        loss = F.cross_entropy(model(row)[0], targets, ignore_index=LAST)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps:
            padded = len(lengths) * max(lengths)
            print(f"step {step}: loss {loss:.2f}, {len(lengths)} documents, {row.numel():,} tokens ({padded:,} padded)")

    # The last document alone gives the logits that it has in the packed row.
    model.eval()
    with torch.no_grad():
        packed = model(row)[:, -lengths[-1] :]
        for layer in model.transformer.layers:
            layer.pattern = None
        alone = model(row[:, -lengths[-1] :])
    difference = (packed - alone).abs().max().item()
    print(f"largest difference between packed and alone: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
