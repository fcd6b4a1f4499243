"""`ringtile show`, the figures of a pattern and the drawings."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringtile import cli
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Dilated, GlobalTokens, Pattern, RandomBlocks, Window, parse, per_head
from ringtile.tools.plot import occupancy, picture, plot_pattern
from ringtile.tools.statistics import pattern_statistics
from ringtile.tools.units import count, count_text

MILLION = 1 << 20


def run(*argv: str) -> int:
    return cli.main(["show", *argv])


def tiles_of(dense: Tensor, block: int, start: int) -> Tensor:
    """Kept pairs of each tile of a dense mask, tiles cut in position space."""
    n_queries, n_keys = dense.shape
    row = torch.arange(start, start + n_queries) // block
    row, col = row - row[0], torch.arange(n_keys) // block
    down = torch.zeros(int(row[-1]) + 1, n_queries).index_put_((row, torch.arange(n_queries)), torch.tensor(1.0))
    across = torch.zeros(n_keys, int(col[-1]) + 1).index_put_((torch.arange(n_keys), col), torch.tensor(1.0))
    return down @ dense.float() @ across


CASES = [
    (Causal() & Window(70), 300, 300, 32),
    (Window(20) | GlobalTokens(5), 129, 257, 64),
    (Causal() & (Dilated([1, 3], 8) | RandomBlocks(1, block=32)), 200, 130, 32),
    (per_head([Causal(), Window(9), Causal()]), 100, 100, 16),
    (Window(40), 90, 130, 32),
]


def whole_tiles(rule: Pattern, index: BlockIndex, heads: int) -> int:
    """Tiles that the rule keeps whole, rows and keys that the lengths do not have included."""
    grid = index.grid.whole
    query, key = torch.arange(grid.start, grid.start + grid.n_queries)[:, None], torch.arange(grid.n_keys)
    kept = torch.stack([rule.allowed(torch.tensor(head), query, key) for head in range(heads)])
    return sum(int((tiles_of(of_head, grid.block, grid.start) == grid.block**2).sum()) for of_head in kept)


@pytest.mark.parametrize(("rule", "n_queries", "n_keys", "block"), CASES)
def test_statistics_agree_with_counting_pairs(rule: Pattern, n_queries: int, n_keys: int, block: int) -> None:
    heads = rule.num_heads or 2
    index = build_index(rule, n_queries, n_keys, num_heads=heads, block=block)
    dense = index.to_dense()[0].expand(heads, n_queries, n_keys)
    counted = pattern_statistics(index, num_heads=heads, head_dim=16)
    tiles = torch.stack([tiles_of(head, block, index.start) for head in dense])
    sizes = tiles_of(torch.ones(n_queries, n_keys), block, index.start)
    assert counted.kept_pairs == int(dense.sum())
    assert counted.density == pytest.approx(int(dense.sum()) / counted.allowed_pairs)
    assert counted.full_tiles + counted.partial_tiles == int((tiles > 0).sum())
    assert counted.full_tiles == whole_tiles(rule, index, heads)
    assert counted.forward_flops == 4 * 16 * int(((tiles > 0) * sizes).sum())
    assert counted.backward_flops * 2 == counted.forward_flops * 5
    assert counted.dense_forward_flops == 4 * 16 * counted.allowed_pairs
    rows, columns = (tiles > 0).sum(2).double(), (tiles > 0).sum(1).double()
    assert counted.longest_row.tiles == rows.max()
    assert rows[:, counted.longest_row.tile - index.first_row].max() == rows.max()
    assert counted.longest_column.tiles == columns.max()
    if index.n_groups == 1:
        assert counted.longest_row.mean == pytest.approx(float(rows.mean()))
        assert counted.longest_column.mean == pytest.approx(float(columns.mean()))
    assert counted.dense_mask_bytes == n_queries * n_keys
    assert counted.index_bytes == index.nbytes


def test_statistics_refuse_other_heads_and_heads_without_elements() -> None:
    for rule, heads in ((per_head([Causal(), Window(1)]), 4), (Causal(), 0)):
        index = build_index(rule, 10, num_heads=rule.num_heads or 1)
        with pytest.raises(ValueError, match=f"num_heads: expected .*, got {heads}"):
            pattern_statistics(index, num_heads=heads)
    with pytest.raises(ValueError, match="head_dim=0"):
        pattern_statistics(build_index(Causal(), 10), head_dim=0)


@pytest.mark.parametrize(("rule", "n_queries", "n_keys", "block"), CASES)
def test_occupancy_is_the_share_of_kept_pairs(rule: Pattern, n_queries: int, n_keys: int, block: int) -> None:
    index = build_index(rule, n_queries, n_keys, num_heads=rule.num_heads or 1, block=block)
    for head, pixels in product(range(rule.num_heads or 1), (4, 64, 4096)):
        shares, side = occupancy(index, head=head, pixels=pixels)
        assert max(shares.shape) <= pixels or pixels < 64
        top = index.start - index.first_row * block
        dense = index.to_dense()[0, head if index.group.shape[1] > 1 else 0].float()
        assert shares.shape == (-(-(top + n_queries) // side) - top // side, -(-n_keys // side))
        cells = [tiles_of(pairs, side, top) for pairs in (dense, torch.ones_like(dense))]
        torch.testing.assert_close(shares, cells[0] / cells[1])


def test_a_million_tokens_are_one_small_picture() -> None:
    axes = plot_pattern(build_index(Causal() & (Window(512) | GlobalTokens(64)), MILLION))
    image = axes.images[0].get_array()
    assert image is not None
    assert image.shape == (512, 512)
    assert 0.2 < image[100, 100] < 0.3
    assert image[100, 0] == pytest.approx(64 / 2048)
    assert image[100, 101] == 0
    assert (axes.get_xlim(), axes.get_ylim(), axes.get_ylabel()) == ((0, MILLION), (MILLION, 0), "query position")
    # The last of more keys is beside the last query.
    axes = plot_pattern(build_index(Causal(), 60, 90))
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 90), (90, 30))


def test_show_json_is_the_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    def record_of(*argv: str) -> dict[str, Any]:
        assert run(*argv, "--json") == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    record = record_of("per_head([causal, window(3)])", "--tokens", "60", "--keys", "90", "--head-dim", "8")
    counted = pattern_statistics(build_index(parse("per_head([causal, window(3)])"), 60, 90, num_heads=2), head_dim=8)
    lists = {name: getattr(counted, name)._asdict() for name in ("longest_row", "longest_column")}
    assert record == {
        "pattern": "per_head([causal, window(3)])",
        **asdict(counted),
        **lists,
        "build_seconds": record["build_seconds"],
        "picture": None,
    }
    one, four = (record_of("causal", "--tokens", "256", "--block", "64", "--heads", heads) for heads in ("1", "4"))
    assert one["partial_tiles"] == 4
    assert four["kept_pairs"] == 4 * one["kept_pairs"]
    assert four["density"] == one["density"] == 1


def test_the_drawing_is_of_pairs_or_has_shades(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(*argv: str) -> list[str]:
        assert run(*argv) == 0
        return capsys.readouterr().out.split("\n")[1:]

    assert drawn("window(1, 0)", "--tokens", "4")[:4] == ["█···", "██··", "·██·", "··██"]
    lines = drawn("window(64) | global_tokens(64)", "--causal", "--tokens", "65536", "--block", "64")
    assert lines[20][0] == lines[20][20] == "▒"
    assert set(lines[20][1:19] + lines[20][21:]) == {"·"}
    assert "░" in drawn("random_blocks(1, block=64)", "--causal", "--tokens", str(MILLION), "--block", "64")[39]


def test_show_draws_a_picture_without_a_display(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "pattern.png"
    # It needs a display, and nothing may import it.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert run("bigbird", "--tokens", "4000", "--out", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["pattern.png"]
    assert str(path) in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("causal", "--tokens", "64", "--out", str(path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"ringtile: error: --out: matplotlib cannot be imported.*pip install matplotlib\n", err)
    assert run("causal", "--tokens", "64") == 0


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for pattern, more, complaint in (
        ("window(-1)", [], "left"),
        ("windo(1)", [], "window"),
        ("causal", ["--heads", "100000"], "heads"),
        ("per_head([causal, dense])", ["--heads", "3"], "heads"),
        ("causal", ["--out", "a.txt"], r"--out: .*a\.txt"),
    ):
        assert run(pattern, "--tokens", "64", *more) == 2
        assert re.search(complaint, capsys.readouterr().err)
    with pytest.raises(ValueError, match=r"path: .*\.png.*a\.bmp"), picture(Path("a.bmp"), 2, 2):
        pass


@pytest.mark.parametrize("n_tokens", [193, 1000, 6200])
def test_the_drawing_ends_with_the_last_query_and_key(capsys: pytest.CaptureFixture[str], n_tokens: int) -> None:
    run("window(0)", "--tokens", str(n_tokens))
    lines = capsys.readouterr().out.split("\n")[1:]
    drawn, legend = lines[: len(lines[0])], lines[len(lines[0])]
    assert "per character" in legend
    side = int(re.search(r"([\d,]+) tokens per character", legend)[1].replace(",", ""))
    assert len(drawn) == -(-n_tokens // side)
    # The diagonal reaches the last cell.
    assert all(line[place] != "·" for place, line in enumerate(drawn))


def test_the_drawing_is_of_ascii_if_the_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "cp1252"):
        for n_tokens in ("4", "4000"):
            buffer = io.BytesIO()
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding=encoding))
            assert run("window(1, 0)", "--tokens", n_tokens) == 0
            sys.stdout.flush()
            lines = buffer.getvalue().decode("ascii").splitlines()
            assert lines[1] == ("#..." if n_tokens == "4" else "+" + "." * 31)
            assert ": . none" in "".join(lines)


def test_counts_are_read_and_written_as_people_write_them() -> None:
    said = {"1": 1, "16K": 16384, "16k": 16384, "1M": MILLION, "1e6": 10**6, "1.5K": 1536, "1,000": 1000, "2_0": 20}
    assert {text: count(text) for text in said} == said
    for text in ("0", "-1", "1.5", "K", "", "1e-3", "nan", "inf", "99999999999999999999", "1e999999999", "ten", "16G"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"16K, 1M or 1e6, got {text!r}"):
            count(text)
    written = {0: "0", 999: "999", 1000: "1,000", 1024: "1K", 1536: "1.5K", 2500: "2,500", 1 << 20: "1M"}
    assert {number: count_text(number) for number in written} == written
    assert count_text(3 << 19) == "1.5M"
