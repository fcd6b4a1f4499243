"""Predicted bytes against those that collectives get, work against the plans, and `ringtile plan`."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from strategies import patterns
from test_distributed import LAYOUTS, PATTERNS

from ringtile import cli
from ringtile.distributed import Layout, RingPlan, make_plan, plan as plan_module
from ringtile.distributed.layout import LAYOUTS as NAMED_LAYOUTS, count_tokens
from ringtile.distributed.plan import TRANSPORTS
from ringtile.index import build_index, build_rows, candidates, needed
from ringtile.patterns import Causal, GlobalTokens, Pattern, RandomBlocks, Window, parse, per_head
from ringtile.patterns.base import TileGrid
from ringtile.tools.predict import cluster, plan as plan_verb, work as work_module
from ringtile.tools.predict.cheapest import cheapest_for_model, cheapest_layout, cost_of_model
from ringtile.tools.predict.cluster import fit_link
from ringtile.tools.predict.cost import Cost, estimate
from ringtile.tools.predict.hardware import HARDWARE, Hardware, Sizes
from ringtile.tools.predict.work import Work, split, survey

N_TOKENS = 700
CAUSAL = Causal()
H100 = HARDWARE["h100"]
MIB = 1 << 20


def check_plans(work: Work, plans: list[RingPlan], is_exact: bool) -> None:
    """Messages, traffic and transport are those of the plans; work and buffers at least."""
    cost = estimate(work, "gather" if plans[0].is_gathered else "exchange", H100)
    parts = split(work, gather=plans[0].is_gathered)
    sizes = work.sizes
    token = sizes.batch * sizes.kv_heads * sizes.width_of_head * sizes.dtype.itemsize
    for rank, plan in enumerate(plans):
        hot = sum(plan.tokens_hot)
        to_others = [plan.tokens_sent[other] + plan.tokens_hot[rank] * (other != rank) for other in range(len(plans))]
        assert cost.traffic[rank].tolist() == [token * tokens for tokens in to_others]
        assert int(cost.messages[rank]) == sum(n > 0 for n in plan.tokens_sent) + (plan.tokens_hot[rank] > 0)
        heads = work.sizes.heads * work.sizes.batch
        tiles = [piece.index.kept_tiles * heads // piece.index.group.numel() for piece in plan.pieces]
        buffered = (sum(plan.tokens_sent) + sum(plan.tokens_received) + hot + plan.n_buffer) * token
        pairs = [
            128 * 128 * sum(n for piece, n in zip(plan.pieces, tiles, strict=True) if piece.source == source)
            for source in ("own", "hot")
        ]
        if is_exact:
            assert int(cost.tiles[rank]) == sum(tiles)
            assert int(cost.buffer[rank]) == buffered
            assert int(cost.copied[rank]) == count_tokens(plan.own.target) * token
            assert int(parts.calls[rank]) == len(plan.pieces)
            if plan.n_tokens % 128 == 0:
                assert [int(parts.own_pairs[rank]), int(parts.hot_pairs[rank])] == pairs
        else:
            assert int(cost.tiles[rank]) >= sum(tiles)
    sent = [sum(plan.tokens_sent) + plan.tokens_hot[rank] for rank, plan in enumerate(plans)]
    assert {plan.most_sent for plan in plans} == {max(sent)}
    if not plans[0].is_gathered:
        assert work.demand.most_sent == max(sent)


def check_rows(work: Work) -> None:
    """The column tiles of each rank and row, and the sources of the rows, are those of the covers."""
    pattern, grid, sizes = work.pattern, work.grid, {"num_heads": 4, "batch": 1}
    rows, ranks, _ = work.layout.tiles()
    touched = needed(pattern, rows, ranks, 4, grid, **sizes)
    assert torch.equal(work.demand.needs, touched)
    holds = torch.zeros_like(touched).index_put_((ranks, rows), torch.tensor(True))
    assert torch.equal(work.demand.holds, holds)
    shared = (holds.sum(0) > holds.long()) & ~work.demand.is_hot
    assert work.demand.is_mixed == bool((touched & shared).any())
    of_row = needed(pattern, rows, torch.arange(len(rows)), len(rows), grid, **sizes)
    remote, cold = of_row & ~holds[ranks], of_row & ~(holds[ranks] | work.demand.is_hot)
    whole = ~work.is_cut[ranks]
    assert torch.equal(work.sources[rows][whole], (remote.any(1).long() + cold.any(1))[whole])
    for gather in (False, True):
        parts = split(work, gather=gather)
        assert not ((parts.needs_hot | parts.needs_all) & ~touched).any()


# Patterns and layouts in turn. Broadcast tokens meet an exchange and a gather in every layout.
@pytest.mark.parametrize(
    ("name", "gather", "layout"),
    [
        (name, gather, layout)
        for row, name in enumerate(PATTERNS)
        for column, layout in enumerate(LAYOUTS)
        for gather in (False, True)
        if (row + column + 2 * gather) % 4 == 0 or name == "global tokens"
    ],
)
def test_work_and_buffers_are_those_of_the_plans(name, gather, layout):
    # With fewer ranks, none of these tiles is broadcast.
    made = LAYOUTS[layout](N_TOKENS, 4)
    work = survey(PATTERNS[name], made, Sizes(4, 2, 8, 4))
    check_rows(work)
    plans = [make_plan(PATTERNS[name], made, rank, num_heads=4, gather=gather) for rank in range(4)]
    # Random blocks and rules without a cover can have empty tiles among the candidates; a rank's part of a tile, too.
    is_exact = (
        name in ("window", "both sides", "global tokens", "causal", "dense", "documents") and "equal" not in layout
    )
    check_plans(work, plans, is_exact)


def test_more_covers_than_are_kept_are_listed_again(monkeypatch):
    rule, layout, sizes = parse("bigbird(2, block=40)"), Layout.striped(N_TOKENS, 3), Sizes(4, 2, 8)
    kept = estimate(survey(rule, layout, sizes), "exchange", H100)
    monkeypatch.setattr(work_module, "_KEPT", 20)
    for mine, theirs in zip(estimate(survey(rule, layout, sizes), "exchange", H100), kept, strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def test_a_plan_lists_the_tiles_of_each_head_once(monkeypatch, capsys):
    listed = []

    def cover(self: RandomBlocks, head: int, rows: torch.Tensor, grid: TileGrid) -> Any:
        listed.append(head)
        return plain(self, head, rows, grid)

    plain = RandomBlocks.cover
    monkeypatch.setattr(RandomBlocks, "cover", cover)
    # Ranks that exchange heads, all of them or in the rows of a mesh, have the tiles of their heads from there, too.
    argv = ["plan", "causal & bigbird", "--tokens", "16K", "--ranks", "4", "16", "--heads", "8", "--kv-heads", "4"]
    assert cli.main(argv) == 0
    assert "ulysses 2x8" in capsys.readouterr().out
    assert listed == list(range(8))
    assert cli.main([*argv, "--layers", "3"]) == 0
    assert listed == list(range(8)) * 2
    cheapest_layout(parse("causal & bigbird"), 16384, 4, Sizes(8, 8))
    assert listed == list(range(8)) * 3


@settings(max_examples=25)
@given(st.data())
def test_candidates_hold_every_tile_once(data):
    n_tokens = data.draw(st.integers(1, 300))
    grid = TileGrid(16, 0, n_tokens, n_tokens)
    pattern = data.draw(patterns(grid, operators=2))
    heads = pattern.num_heads or 2
    kept = build_index(pattern, n_tokens, num_heads=heads, block=16).kept_tiles
    total = 0
    for copies, (row, lo, hi) in candidates(pattern, grid, num_heads=heads):
        assert (hi > lo).all()
        assert (hi <= grid.n_cols).all()
        assert (lo >= 0).all()
        after = row[1:] == row[:-1]
        assert (lo[1:][after] >= hi[:-1][after]).all()
        assert (row[1:] >= row[:-1]).all()
        total += copies * int((hi - lo).sum())
    groups = build_index(pattern, n_tokens, num_heads=heads, block=16).group.numel()
    assert total >= kept * heads // groups


def test_a_million_tokens():
    n_ranks = 64
    window = survey(CAUSAL & Window(4096), Layout.contiguous(1 << 20, n_ranks), Sizes())
    cost = estimate(window, "exchange", H100)
    assert cost.received.tolist() == [min(16, rank * 4096 // n_ranks) * MIB for rank in range(n_ranks)]
    assert window.automatic == "exchange"
    sinks = survey(CAUSAL & (Window(4096) | GlobalTokens(128)), Layout.contiguous(1 << 20, n_ranks), Sizes())
    cost = estimate(sinks, "exchange", H100)
    assert max(int(cost.received.max()), int(cost.sent.max())) <= 17 * MIB
    assert int(cost.peers[0]) == n_ranks - 1


def test_the_default_transport_is_that_of_ring_attention():
    sizes = Sizes(2, 2, 8)
    cases = [(CAUSAL & Window(100), 3), (CAUSAL, 3), (CAUSAL, 1), (~CAUSAL, 5)]
    found = [survey(pattern, Layout.contiguous(N_TOKENS, n), sizes).automatic for pattern, n in cases]
    assert found == ["exchange", "ring", "exchange", "gather"]


@pytest.mark.parametrize(("pattern", "is_gathered"), [(~CAUSAL, True), (CAUSAL & Window(100), False)])
def test_a_plan_that_chooses_a_gather_builds_one_index(pattern, is_gathered, monkeypatch):
    built = []

    def build(*arguments: Any, **keywords: Any) -> Any:
        built.append(arguments)
        return build_rows(*arguments, **keywords)

    monkeypatch.setattr(plan_module, "build_rows", build)
    layout = Layout.contiguous(N_TOKENS + 1, 5)
    chosen = make_plan(pattern, layout, 1, gather=None)
    assert len(built) == 1
    assert chosen.is_gathered == is_gathered
    named = make_plan(pattern, layout, 1, gather=is_gathered)
    assert (chosen.fingerprint, chosen.received, chosen.hot) == (named.fingerprint, named.received, named.hot)


def test_one_rank_sends_nothing():
    for transport in TRANSPORTS:
        cost = estimate(survey(CAUSAL, Layout.contiguous(N_TOKENS, 1), Sizes()), transport, H100)
        moved = (cost.sent, cost.received, cost.sent_backward, cost.received_backward, cost.messages, cost.peers)
        assert not any(int(x.sum()) for x in moved), transport
        assert cost.balance == 1
        assert cost.seconds > 0


def hardware(**figures: float) -> Hardware:
    fast: dict[str, Any] = {"net_beta": 1e15, "node_beta": 1e15, "flops": 1e18, "memory": 1e18}
    slow = {"net_alpha": 1e-12, "node_alpha": 1e-12, "call": 1e-12}
    shape = {"ranks_per_node": 2, "processors_per_node": 2, "has_trees": False}
    return Hardware("test", "none", **{**shape, **fast, **slow, **figures})


def seconds(pattern: Pattern, layout: Layout, transport: Any, **figures: float) -> tuple[float, float]:
    cost: Cost = estimate(survey(pattern, layout, Sizes()), transport, hardware(**figures))
    return float(cost.forward.max()), float(cost.backward.max())


def test_time_is_that_of_the_slowest_part():
    layout, window = Layout.contiguous(8192, 4), CAUSAL & Window(1024)
    # Ranks 0 and 1, 2 and 3 are nodes: one message of 1,024 tokens over each kind of link. The halo of 128 whole
    # rows begins at a tile's edge.
    halo = 1024 * 2 * 8 * 128 * 2
    forward, backward = seconds(window, layout, "exchange", net_beta=1e9)
    assert forward == pytest.approx(halo / 1e9, rel=1e-3)
    assert backward == pytest.approx(halo / 1e9, rel=1e-3)
    assert seconds(window, layout, "exchange", node_beta=1e9)[0] == pytest.approx(halo / 1e9, rel=1e-3)
    assert seconds(window, layout, "exchange", net_alpha=2.0, node_alpha=1.0)[0] == pytest.approx(2, rel=1e-3)
    assert seconds(window, Layout.contiguous(8192, 2), "exchange", net_alpha=9.0, node_alpha=1.0)[0] < 1.1
    # Rows that need no other rank's keys run beside the exchange: 8 of a rank's 16 tiles of 9 tiles each.
    flops = 9 * 128 * 128 * 4 * 128 * 32
    interior = 8 * flops / 1e12
    alone = seconds(window, layout, "exchange", flops=1e12)
    assert alone == pytest.approx((2 * interior, 5 * interior), rel=1e-3)
    short = seconds(window, layout, "exchange", flops=1e12, net_beta=halo / (0.5 * interior))
    assert short == pytest.approx((2 * interior, 5 * interior), rel=1e-3)
    long = seconds(window, layout, "exchange", flops=1e12, net_beta=halo / (3 * interior))
    assert long == pytest.approx((4 * interior, 5.5 * interior), rel=1e-3)
    assert seconds(window, layout, "exchange", call=1.0)[0] == pytest.approx(2, rel=1e-3)
    # Rows that also read broadcast tokens, 10 tiles each, wait for a tree of two steps and run beside the all-to-all.
    part = 10 * flops / 9 * 8 / 1e12
    for alpha, expected in ((0.25, (2.5, 5.5)), (2, (7, 9))):
        sinks = CAUSAL & (Window(1024) | GlobalTokens(128))
        found = seconds(sinks, layout, "exchange", flops=1e12, net_alpha=alpha * part, node_alpha=alpha * part)
        assert found == pytest.approx([part * times for times in expected], rel=1e-3)
    # Causal around a ring: three hops of keys, then three of keys and four of gradients in float32.
    keys = 2048 * 2 * 8 * 128 * 2
    forward, backward = seconds(CAUSAL, layout, "ring", net_beta=1e9)
    assert forward == pytest.approx(3 * keys / 1e9, rel=1e-3)
    assert backward == pytest.approx((3 + 4 * 2) * keys / 1e9, rel=1e-3)


def test_ranks_share_the_processors_of_their_node():
    layout, window = Layout.contiguous(8192, 4), CAUSAL & Window(1024)
    alone = seconds(window, layout, "exchange", flops=1e12)
    for processors in (1, 3):
        found = seconds(window, layout, "exchange", flops=1e12, ranks_per_node=4, processors_per_node=processors)
        # Rank 0 has less work than the others.
        pairs = survey(window, layout, Sizes()).pairs
        turns = max(1.0, float(pairs.sum() / pairs.max()) / processors)
        assert found[1] == pytest.approx(alone[1] * turns, rel=1e-3)
    # Two nodes of two ranks: the third and fourth rank have a node of their own.
    single = seconds(window, layout, "exchange", flops=1e12, processors_per_node=1)
    assert single[1] == pytest.approx(2 * alone[1], rel=1e-3)
    # Under causal, one rank computes longer than all others together need turns.
    layout = Layout(8192, (((128, 8192),), ((0, 128),)))
    long = [seconds(window, layout, "gather", flops=1e12, processors_per_node=n)[1] for n in (1, 2)]
    assert long[0] == pytest.approx(long[1], rel=0.02)


def test_trees_send_a_message_several_times():
    layout = Layout.contiguous(8192, 8)
    token, wide = 2 * 8 * 128 * 2, 2 * 8 * 128 * 4
    whole = seconds(CAUSAL, layout, "gather", net_beta=1e9)
    assert whole == pytest.approx((8192 * token / 1e9, 8192 * wide / 1e9), rel=1e-3)
    trees = seconds(CAUSAL, layout, "gather", net_beta=1e9, has_trees=True)
    assert trees == pytest.approx((3 * whole[0], 1.75 * whole[1]), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "n_ranks", "expected"),
    [
        ("causal & window(4096)", 8, "contiguous"),
        ("causal", 8, "zigzag"),
        ("causal & block_dilated([64], 40)", 64, "striped"),
        ("dense", 1, "contiguous"),
    ],
)
def test_the_cheapest_layout_has_the_least_time(text, n_ranks, expected, capsys):
    rule, n_tokens = parse(text), 1 << 18
    found = cheapest_layout(rule, n_tokens, n_ranks)
    assert found == NAMED_LAYOUTS[expected](n_tokens, n_ranks)
    works = [survey(rule, make(n_tokens, n_ranks), Sizes()) for make in NAMED_LAYOUTS.values()]
    times = [estimate(work, work.automatic, H100).seconds for work in works]
    assert min(times) == times[list(NAMED_LAYOUTS).index(expected)]
    assert cli.main(["plan", text, "--tokens", str(n_tokens), "--ranks", str(n_ranks)]) == 0
    assert f"; cheapest_layout: {expected}\n" in capsys.readouterr().out


def test_the_cheapest_layout_depends_on_the_hardware():
    # Under a wide causal window, stripes have the most equal work and send the most.
    rule, sizes = CAUSAL & Window(3000), Sizes(heads=8)
    layouts = [cheapest_layout(rule, 8192, 4, sizes, hardware(flops=1e9 * f, net_beta=1e9)) for f in (1, 1e9)]
    assert layouts == [Layout.striped(8192, 4), Layout.contiguous(8192, 4)]
    with pytest.raises(ValueError, match="over max_bytes"):
        cheapest_layout(~CAUSAL, 1 << 20, 1)


def test_a_model_has_one_layout_and_a_transport_for_each_pattern():
    window, sizes = CAUSAL & Window(4096), Sizes()
    for layers, n_ranks, chosen in (
        ({window: 10, CAUSAL: 2}, 64, "hierarchy"),
        ({window: 1, CAUSAL: 1}, 8, "exchange"),
    ):
        found = cheapest_for_model(layers, 1 << 16, n_ranks)
        assert found.transports[window] == chosen
        totals = []
        for make in NAMED_LAYOUTS.values():
            works = {rule: survey(rule, make(1 << 16, n_ranks), sizes) for rule in layers}
            names = ["exchange", "gather", *(["hierarchy"] if n_ranks > 8 else [])]
            best = {
                rule: min((estimate(work, how, H100).seconds, how) for how in [*names, *(["ring"] * (rule == CAUSAL))])
                for rule, work in works.items()
            }
            total = sum(count * best[rule][0] for rule, count in layers.items())
            totals.append((total, {rule: how for rule, (_, how) in best.items()}, make(1 << 16, n_ranks)))
        assert (found.seconds, found.transports, found.layout) == min(totals, key=lambda each: each[0])
    without = cheapest_for_model({window: 10, CAUSAL: 2}, 1 << 16, 64, transports=("exchange",))
    assert set(without.transports.values()) == {"exchange"}
    # One layout for all: a few causal layers outweigh many windows.
    assert cheapest_layout({CAUSAL & Window(1024): 100}, 1 << 18, 8) == Layout.contiguous(1 << 18, 8)
    assert cheapest_layout({CAUSAL & Window(1024): 10, CAUSAL: 2}, 1 << 18, 8) == Layout.zigzag(1 << 18, 8)
    with pytest.raises(ValueError, match="layers: expected a positive number of layers of each pattern, got"):
        cheapest_for_model({CAUSAL: 0}, 1 << 16, 8)
    with pytest.raises(ValueError, match="transport 'ring': expected the pattern dense or causal"):
        cheapest_for_model({window: 1}, 1 << 16, 8, transports=("ring",))


def test_bad_input():
    # A ring builds no index of all its rows, so it is not too large.
    large = survey(CAUSAL, Layout.contiguous(1 << 20, 2), Sizes())
    assert estimate(large, "ring", H100).seconds > 0
    work, whole = survey(CAUSAL & Window(3), Layout.striped(1024, 2, unit=1), Sizes()), Layout.contiguous(300, 2)

    for expected, call in (
        ("kv_heads: expected a divisor of heads=6, got 4", lambda: Sizes(6, 4)),
        ("dtype: expected a floating-point dtype, got torch.int8", lambda: Sizes(dtype=torch.int8)),
        ("flops: expected a positive number, got nan", lambda: hardware(flops=float("nan"))),
        ("ranks_per_node: expected a positive integer, got 2.5", lambda: hardware(ranks_per_node=2.5)),
        ("heads: .* defined for 2, got 32", lambda: survey(per_head([CAUSAL, Window(3)]), whole, Sizes())),
        ("at most 4,096 ranks", lambda: survey(CAUSAL, Layout.contiguous(300, 5000), Sizes())),
        ("expected the pattern dense or causal, got causal & window", lambda: estimate(work, "ring", H100)),
        ("at most 256 runs that begin or end inside a tile.*got 512", lambda: estimate(work, "exchange", H100)),
        ("causal with 1048576 queries .* over max_bytes", lambda: estimate(large, "exchange", H100)),
    ):
        with pytest.raises(ValueError, match=expected):
            call()


MEASURE = """
import resource, sys
from ringtile.distributed import Layout, make_plan
from ringtile.tools.predict.cost import estimate
from ringtile.tools.predict.hardware import HARDWARE, Sizes
from ringtile.tools.predict.work import survey
from ringtile.patterns import parse
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for rule in sys.argv[1:]:
    estimate(survey(parse(rule), Layout.zigzag(1 << 20, 64), Sizes()), "exchange", HARDWARE["h100"])
    make_plan(parse(rule), Layout.contiguous(1 << 20, 64), 63)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_million_tokens_over_64_ranks_need_little_memory():
    rules = [CAUSAL & (Window(4096) | GlobalTokens(128)), CAUSAL]
    command = [sys.executable, "-c", MEASURE, *map(repr, rules)]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 256


def test_a_plan_stars_what_auto_takes(capsys):
    argv = ["plan", "causal & (window(4096) | global_tokens(128))", "--tokens", "1M", "--ranks", "8", "256"]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("no ring: transport 'ring': expected the pattern dense or causal") == 2
    few, many = out.split("\n256 ranks (")
    assert "\n* contiguous  exchange " in few
    assert "528.0 MiB (contiguous, exchange), " in few
    assert "hierarchy" not in few
    assert "\n+ " not in few
    for text in (
        "\n* contiguous  exchange ",
        "\n+ zigzag      hierarchy 32x8 ",
        "\n  32x8: with group=init_device_mesh(device, (32, 8))\n",
    ):
        assert text in many
    assert "own keys" not in many


def test_plan_prints_the_layouts_of_a_model(capsys):
    argv = ["plan", "window(1024)", "dense", "--causal", "--layers", "20", "4", "--tokens", "64K", "--ranks", "1", "16"]
    layers = {CAUSAL & Window(1024): 20, CAUSAL & parse("dense"): 4}
    costs = {name: cost_of_model(layers, make(1 << 16, 16), Sizes(), H100) for name, make in NAMED_LAYOUTS.items()}
    best = min(costs, key=lambda name: costs[name].seconds)
    assert cli.main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["layers"] == {"causal & window(1024)": 20, "causal & dense": 4}
    (row,) = [row for row in record["tables"][1]["rows"] if row["best"]]
    assert row["transports"] == list(costs[best].transports.values())
    assert row["model_seconds"] == costs[best].seconds
    sent = sum(n * costs[best].costs[rule].between for rule, n in layers.items())
    assert row["most_between"] == int(sent.max())


def test_plan_prints_json_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    argv = ["plan", "causal", "--tokens", "16K", "--ranks", "1", "300", "--layout", "zigzag", "contiguous"]
    assert cli.main([*argv, "--json", "--out", str(file), "--dtype", "float32"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["sizes"]["dtype"] == "float32"
    assert [table["ranks"] for table in record["tables"]] == [1, 300]
    for table in record["tables"]:
        totals = [sum(row["model_seconds"].values()) if "reason" not in row else float("inf") for row in table["rows"]]
        best = totals.index(min(totals))
        assert [row["best"] for row in table["rows"]] == [number == best for number in range(len(totals))]
    work = survey(parse("causal"), Layout.zigzag(16384, 300), Sizes(dtype=torch.float32))
    row = record["tables"][1]["rows"][2]
    assert (row["layout"], row["transport"]) == ("zigzag", "ring")
    assert row["most_received"] == int(estimate(work, "ring", H100).received.max())
    assert record["tables"][1]["rows"][3]["reason"].endswith("expected nodes of 8 ranks, got 300 ranks")
    assert record["tables"][1]["rows"][5]["mesh"] == [75, 4]
    assert file.read_bytes()[1:4] == b"PNG"


def test_figures_of_your_own(capsys, tmp_path):
    file = tmp_path / "mine.json"
    argv = ["plan", "causal", "--tokens", "16K", "--ranks", "4", "--hardware", str(file)]
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("ringtile: error: [Errno 2] No such file")
    figures: dict[str, Any] = {**vars(hardware()), "name": "mine"}
    for text, expected in (
        ("{", "expected a JSON object, got Expecting"),
        ("[]", "got list"),
        (json.dumps({**figures, "beta": 3}), "call, got name,"),
        (json.dumps({**figures, "net_beta": 0}), "net_beta: expected a positive number, got 0"),
        (json.dumps({**figures, "name": 3}), "name: expected a string, got 3"),
    ):
        file.write_text(text)
        assert cli.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert expected in err
    file.write_text(json.dumps(figures))
    assert cli.main(argv) == 0
    assert "model of mine: none" in capsys.readouterr().out


def test_a_link_is_fitted_by_latency_and_bandwidth():
    sizes = [1 << bits for bits in range(8, 24, 3)]
    alpha, beta = fit_link([(size, 3e-4 + size / 2e8) for size in sizes])
    assert (alpha, beta) == (pytest.approx(3e-4), pytest.approx(2e8))
    # Relative errors count: one slow large message does not move the latency.
    alpha, _ = fit_link([(size, (3e-4 + size / 2e8) * (1.3 if size == sizes[-1] else 1)) for size in sizes])
    assert alpha == pytest.approx(3e-4, rel=0.1)
    assert fit_link([(1000, 0.001), (2000, 0.003)])[0] == 1e-9
    with pytest.raises(ValueError, match="expected larger messages to take longer"):
        fit_link([(1000, 0.002), (2000, 0.001)])


def test_plan_measures_this_machine(capsys, tmp_path, monkeypatch):
    # One round is enough, and processes of a server start in milliseconds.
    monkeypatch.setattr(plan_verb, "measure_machine", partial(cluster.measure_machine, 1))
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(cluster.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(cluster, "processors_of", lambda device: 2)
    file = tmp_path / "mine.json"
    argv = ["plan", "causal & window(300)", "--tokens", "16K", "--ranks", "4", "--json"]
    assert cli.main([*argv, "--measure", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert list(tmp_path.iterdir()) == [file]
    found = Hardware.read(file)
    assert found.processors_per_node == 2
    assert found.has_trees
    assert 0 < found.net_alpha < 1
    assert found.flops > 1e8
    assert cli.main([*argv, "--hardware", str(file)]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["causal", "--ranks", "9K"], "--ranks: expected at most 4,096, got 9,216"),
        (["causal", "--tokens", "1e10"], "--tokens: expected at most 268,435,456, got 10,000,000,000"),
        (["causal", "--out", "plan.txt"], "--out: expected a file name ending in"),
        (["causal", "--measure", "x", "--hardware", "h100"], "--measure: expected no --hardware beside it, got 'h100'"),
        (["causal", "--measure", "no/mine.json"], "--measure: expected a file in a folder that exists, got 'no/mine"),
        (["causal", "dense", "--layers", "3"], "--layers: expected a positive number for each of 2 patterns, got [3]"),
        (["causal", "causal"], "PATTERN: expected different patterns, got [causal, causal]"),
        (["causal", "dense", "--out", "plan.png"], "--out: expected one pattern, got 2"),
        (["~causal", "--tokens", "1M", "--ranks", "1"], "--ranks 1: ~causal with"),
        (["dense", "--tokens", "256M", "--ranks", "4096"], "over max_bytes"),
    ],
)
def test_refusals_are_one_line(arguments, expected, capsys):
    at = next((place for place, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    assert cli.main(["plan", *arguments[:at], "--tokens", "16K", "--ranks", "4", *arguments[at:]]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ringtile: error: ")
    assert err.count("\n") == 1
    assert expected in err
