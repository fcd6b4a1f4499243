"""The code blocks of the block-sparse guide, as printed: each runs after a prelude of the names it leaves undefined.

The blocks are those of the guide of dilated-attention-pytorch (MIT licence), in their order, in ``block_NN.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import oracle, relative_error
from preludes import PRELUDES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import dilated_attention_pytorch as compat
from ringtile.adaptive import AdaptiveAttention
from ringtile.functional.dilated import dilated_attention
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Blocks, Causal, hierarchical, longnet_union

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BLOCKS = {int(path.stem[-2:]): path.read_text(encoding="utf-8") for path in sorted(HERE.glob("block_*.py"))}
DIGEST = "07dd1a80df825005d7906f98c0ee0de486a6beb5f3ce0555f7950ec9ac1b4014"


@pytest.fixture(autouse=True)
def _old_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "compat"))


def too_short(test: Callable[..., None]) -> Callable[..., None]:
    """The lengths are small here, and what the ratio and the rates ask for has no room: both are said in a warning."""
    for said in ("dilation_rates=", "sparsity_ratio=.* cannot be reached"):
        test = pytest.mark.filterwarnings(f"ignore:{said}")(test)
    return test


def run(number: int, source: str | None = None) -> dict[str, Any]:
    """The names after a block, as printed unless there is a ``source``."""
    names: dict[str, Any] = {"__name__": f"block_{number:02d}", **PRELUDES[number]()}
    exec(compile(source or BLOCKS[number], f"block_{number:02d}.py", "exec"), names)
    return names


def test_all_blocks_are_here_as_printed() -> None:
    assert sorted(BLOCKS) == list(range(1, 23))
    assert hashlib.sha256("".join(BLOCKS.values()).encode()).hexdigest() == DIGEST


def test_block_07_a_hierarchy_of_densities() -> None:
    attention = run(7)["attention"]
    assert attention.pattern == hierarchical(2048, 8192, 0.4, 0.1, 0.05) | longnet_union([2048, 4096, 8192], [1, 2, 4])


def test_block_10_example_3_in_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    asked, init_process_group = [], torch.distributed.init_process_group

    def on_a_cpu(backend: str) -> None:
        asked.append(backend)
        init_process_group("gloo")

    monkeypatch.setattr(torch.distributed, "init_process_group", on_a_cpu)
    names = run(10)
    assert asked == ["nccl"]
    torch.distributed.destroy_process_group()
    q, k, v = (names[f"{name}_local"].transpose(1, 2) for name in "qkv")
    expected = oracle(q, k, v, names["attention"].pattern)[0].transpose(1, 2)
    assert relative_error(names["output"], expected) < 1e-5


def test_every_block_has_a_test_here() -> None:
    written = {int(number) for number in re.findall(r"^def test_block_(\d+)", Path(__file__).read_text(), re.M)}
    assert written == set(BLOCKS)


def density_of(config: compat.SparsePatternConfig, n_tokens: int) -> float:
    return build_index(compat.SparsePatternGenerator(config).rule(n_tokens), n_tokens).tile_density


def test_block_01_local_window() -> None:
    with pytest.warns(UserWarning, match=r"local_window_size=512 changes nothing: sparsity_ratio=0\.1 decides"):
        config = run(1)["config"]
    assert density_of(config, 16384) == pytest.approx(0.1, rel=0.02)


def test_block_02_dilated_sparse() -> None:
    assert density_of(run(2)["config"], 16384) == pytest.approx(0.25, rel=0.02)


def test_block_03_global_local() -> None:
    with pytest.warns(UserWarning, match=r"local_window_size=256 changes nothing: sparsity_ratio=0\.2 decides"):
        config = run(3)["config"]
    assert density_of(config, 16384) == pytest.approx(0.2, rel=0.02)
    kept = compat.SparsePatternGenerator(config).rule(16384)
    head, token = torch.tensor(0), torch.arange(16384)
    # The 64 tokens as the whole block whose tiles are computed.
    assert kept.allowed(head, token, torch.tensor(127)).all()
    assert kept.allowed(head, torch.tensor(127), token).all()
    assert not kept.allowed(head, token, torch.tensor(128)).all()


def test_block_04_tiles_that_follow_the_content() -> None:
    attention = run(4)["attention"]
    q, k, v = torch.randn(3, 1, 4500, 2, 16).unbind()
    out = attention(q, k, v)
    # Other contents, other tiles.
    before = [index.to_dense() for index in attention._last._chosen]
    assert attention.get_memory_info()["memory_reduction"] > 0.5
    rows = torch.tensor([5, 3000, 4100])
    far, near = (dilated_attention(*(x.transpose(1, 2) for x in (q, k, v)), *of).transpose(1, 2)[:, rows]
                 for of in (([2048, 4096], [1, 2]), ([128], [1])))  # fmt: skip
    assert not out[:, rows].allclose(far)
    assert not out[:, rows].allclose(near)
    attention(q.flip(1), k, v)
    assert any(not torch.equal(x, index.to_dense()) for x, index in zip(before, attention._last._chosen, strict=True))


@too_short
def test_block_05_attention_inside_dilated_segments() -> None:
    names = run(5)
    q, k, v = (names[name].transpose(1, 2) for name in ("query", "key", "value"))
    attention = names["attention"]
    # 700 tokens lie in one segment of each branch: (700, 1), (350, 2) and (175, 4), mixed by their denominators.
    rule = attention._last[0]
    total, weighted = 0.0, 0.0
    for rate in (1, 2, 4):
        out, lse = torch.zeros(1, 4, 700, 16).double(), torch.full((1, 4, 700), -math.inf).double()
        for head in range(4):
            at = torch.arange(head % rate, 700, rate)
            part = oracle(*(x[:, head : head + 1, at] for x in (q, k, v)), Causal() & rule)
            out[:, head, at], lse[:, head, at] = part.out[:, 0], part.lse[:, 0]
        total, weighted = total + lse.exp(), weighted + lse.exp().unsqueeze(-1) * out
    expected = (weighted / total.unsqueeze(-1)).transpose(1, 2)
    assert relative_error(names["output"], expected) < 1e-6
    # The diagonals of the branches' six, three and two rows of tiles, of the tiles that dense attention computes.
    assert attention.get_memory_info()["theoretical_speedup"] == pytest.approx(21 / (6 + 3 + 2))


@too_short
def test_block_06_multihead_with_weights() -> None:
    names = run(6)
    assert names["output"].shape == (1, 700, 512)
    assert names["weights"].shape == (1, 700, 700)
    assert names["weights"].sum(-1).allclose(torch.ones(()))
    kept = names["weights"][0] > 0
    tiles = torch.nn.functional.max_pool2d(kept[None].double(), 128, ceil_mode=True)[0]
    assert torch.equal(tiles, torch.eye(6).double())


@too_short
def test_block_08_twelve_layers_of_100_000_tokens() -> None:
    # As printed, in shapes alone: the numbers would take hundreds of gigabytes to train on.
    with FakeTensorMode():
        output = run(8)["output"]
    assert output.shape == (4, 100_000, 512)
    # And for real, with fewer tokens, batch rows and layers.
    small = BLOCKS[8].replace("batch_size = 4", "batch_size = 1").replace("seq_len = 100_000", "seq_len = 1500")
    output = run(8, small.replace("range(12)", "range(2)"))["output"]
    output.sum().backward()
    assert output.isfinite().all()


def test_block_09_patterns_that_follow_training(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, choose = [], AdaptiveAttention.index

    def recorded(*arguments: Any, **options: Any) -> BlockIndex:
        chosen.append(choose(*arguments, **options))
        return chosen[-1]

    monkeypatch.setattr(AdaptiveAttention, "index", recorded)
    names = run(9)
    assert names["weights"].shape == (1, 1100, 1100)
    assert names["weights"].detach().sum(-1).allclose(torch.ones(()))
    assert names["attention"].attention.adaptive.choice.budget.quality == 0.95
    assert names["optimizer"].losses[1] < names["optimizer"].losses[0]
    # Both steps have the same batch: the gradients of the first have moved the tiles of the second.
    first, second = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    assert len(first) == len(second) > 3
    assert min(index.tile_density for index in chosen) < 0.9
    assert any(not torch.equal(x.to_dense(), y.to_dense()) for x, y in zip(first, second, strict=True))


@too_short
def test_block_11_visualisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(11)
    assert names["pattern"].shape == (8, 32, 32)
    assert (tmp_path / "sparse_pattern.png").read_bytes().startswith(b"\x89PNG")


@too_short
def test_block_12_quality(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(12)
    printed = capsys.readouterr().out
    weights, pattern = names["dense_attention_weights"], names["pattern"]
    kept = pattern.repeat_interleave(128, 1).repeat_interleave(128, 2)
    coverage = (weights * kept).sum(-1).mean().item()
    density = pattern.double().mean().item()
    assert printed.splitlines() == [
        f"Coverage: {coverage:.2%}",
        f"Locality: {names['metrics'].locality_score:.2%}",
        f"Efficiency: {1 / density:.2f}x",
        f"Approximation Error: {names['metrics'].approximation_error:.4f}",
        f"Average row density: {density:.2%}",
        "Diagonal density: 100.00%",
    ]


@too_short
def test_block_13_adjusting_the_density(capsys: pytest.CaptureFixture[str]) -> None:
    attention = run(13)["attention"]
    score = attention.get_performance_stats()["quality_score"]
    steps = capsys.readouterr().out.count("Increased sparsity")
    assert attention.sparse_config.sparsity_ratio == pytest.approx(0.5 * 0.8**steps)
    assert steps == (2 if score > 0.98 else 0)


def test_block_14_a_pattern_of_ones_own() -> None:
    names = run(14)
    attention = names["attention"]
    made = names["create_custom_pattern"](512, 4)
    x = torch.randn(1, 512, 32)
    before = attention(x)[0]
    attention.pattern_generator.pattern_cache[512] = made
    assert not attention(x)[0].allclose(before)
    q = torch.randn(1, 4, 512, 16)
    expected = oracle(q, q, q, Blocks(made)).out
    assert relative_error(attention.attention.attend(q, q, q), expected) < 1e-6


class CpuForCuda(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA, and remembers how often."""

    asked = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
            self.asked += 1
        return func(*args, **kwargs)


def test_block_15_production_settings() -> None:
    # in_proj weight and bias, out_proj weight and bias, two of the layer norm
    with CpuForCuda() as mode:
        attention = run(15)["attention"]
    assert [x.dtype for x in attention.parameters()] == [torch.float16] * 6
    assert mode.asked == 6
    assert attention.layer_norm is not None


@pytest.mark.gpu
def test_block_15_on_its_device() -> None:
    attention = run(15)["attention"]
    assert {x.device.type for x in attention.parameters()} == {"cuda"}
    x = torch.randn(2, 9000, 1024, device="cuda", dtype=torch.float16)
    assert attention(x, is_causal=True)[0].isfinite().all()


def test_block_16_memory(capsys: pytest.CaptureFixture[str]) -> None:
    attention = run(16)["attention"]
    printed = capsys.readouterr().out
    assert "Pattern cache size: 1\n" in printed
    assert "nan" not in printed
    assert attention.get_memory_info()["pattern_cache_size"] == 0


def test_block_17_monitoring(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(17)
    assert names["stats"]["avg_sparsity"] == pytest.approx(0.25, rel=0.02)
    assert not any(math.isnan(value) for value in names["stats"].values())
    assert "Average sparsity: 25.0%" in capsys.readouterr().out


lightning = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed"
)


COMPLETION = """
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
"""


@lightning
@pytest.mark.filterwarnings("ignore")
@too_short
def test_block_18_completed_trains(tmp_path: Path) -> None:
    """Added: an optimiser, batches, the model itself, and a trainer for the CPU in full precision."""
    printed, _ = BLOCKS[18].split("# Train with automatic optimization")
    names = run(18, f"{printed}{COMPLETION}".replace("import pytorch", "import torch\nimport pytorch"))
    model, pl = names["SparseLM"](), names["pl"]
    batch = {"input": torch.randn(300, 768), "target": torch.randn(300, 768).softmax(-1)}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    before = [x.detach().clone() for x in model.parameters()]
    model.attention.performance_monitor.enable()
    trainer.fit(model, torch.utils.data.DataLoader([batch] * 4, batch_size=2))
    assert trainer.global_step == 2
    assert all(not torch.equal(x, y) for x, y in zip(model.parameters(), before, strict=True))
    assert trainer.logged_metrics["train/sparsity"] == pytest.approx(3 / 9)
    assert trainer.logged_metrics["train/speedup"] > 0


def test_block_19_adaptive_sparsity() -> None:
    attention = run(19)["attention"]
    assert attention.sparse_config.sparsity_ratio == 0.25
    x = torch.randn(1, 3000, 32)
    out = attention(x)[0]
    (index,) = attention.attention._last._chosen
    # A quarter of each row of 24 tiles.
    assert set(index.tiles.sum(3).flatten().tolist()) == {6}
    assert not torch.equal(index.tiles[0, 0], index.tiles[0, 1])
    attention.enable_adaptive_sparsity(False)
    assert not attention(x)[0].allclose(out)


def test_block_20_larger_blocks() -> None:
    attention = run(20)["attention"]
    assert attention.pattern_generator.create_pattern(1024).shape == (4, 4)
    assert attention.get_memory_info()["pattern_cache_size"] == 1


@too_short
def test_block_21_patterns_made_beforehand() -> None:
    attention = run(21)["attention"]
    cache = attention.pattern_generator.pattern_cache
    before = cache.solved.cache_info()
    assert before.currsize == 5  # the one of the prelude, and four lengths
    attention(torch.randn(1, 2048, 32))
    assert cache.solved.cache_info().misses == before.misses
    assert cache.solved.cache_info().hits == before.hits + 1


def test_block_22_padding_is_not_needed() -> None:
    names = run(22)
    assert names["padded_len"] == 10112
    config = compat.SparsePatternConfig("local_window", local_window_size=128)
    attention = compat.BlockSparseRingDilatedAttention(sparse_config=config)
    assert attention(torch.randn(1, names["seq_len"], 1, 8)).shape == (1, 10_000, 1, 8)
