"""The programs in examples/ run, at small sizes, and each has a how-to page that shows it."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from programs import output_of
from safetensors.torch import load_file
from torch import Tensor

from ringtile.integrations.transformers import register, use_ringtile
from ringtile.patterns import GlobalTokens, Window

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    # A process has one precision for all of its accelerators, and each example is a process.
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_window_is_trained_and_its_model_continues_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, model = tmp_path / "text.txt", str(tmp_path / "model.pt")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    small = ["--context", "256", "--window", "32"]
    # An untrained model needs 8 bits per byte.
    assert example("train_window").main([str(text), *small, "--steps", "5", "--save", model]) < 7
    made = example("generate").main([model, "--bytes", "30", "--prompt", "the quick brown fox"])
    assert len(made) == 30
    # The window keeps 32 keys before the query and the query's own; 4 tokens are global.
    assert "48 tokens seen, 37 keys per layer kept" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example("generate").main([model, "--prompt", ""])
    assert capsys.readouterr().err.endswith("error: --prompt: expected at least one byte, got ''\n")


def test_a_file_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    reading = ("train_window", "longnet", "finetune_lora", "train_context_parallel", "train_lightning", "train_indexer")
    for name, argument in (*((name, "file") for name in reading), ("generate", "model")):
        with pytest.raises(SystemExit):
            example(name).main(["no/such/file"])
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"error: {argument}: expected a " in last
        assert last.endswith("got 'no/such/file'")


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(SystemExit, match="the text has 5 bytes: too few for --context 256"):
        example("train_window").main([str(tmp_path / "text.txt"), "--context", "256"])


def test_longnet_trains_on_the_manual() -> None:
    assert example("longnet").main(["--context", "256", "--steps", "5"]) < 7


def test_a_custom_rule_equals_a_dense_mask() -> None:
    assert example("custom_rule").main(["--side", "20", "--radius", "2"]) < 1e-5


def test_packed_documents_equal_separate_ones() -> None:
    assert example("pack_documents").main(["--tokens", "600", "--steps", "5"]) < 1e-4


def test_ranks_share_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "512", "--window", "64", "--steps", "5"]
    assert example("train_ranks").main(words) < 7
    alone = re.findall(r"^(step \d: .*) bits", capsys.readouterr().out, re.M)
    assert len(alone) == 5
    shared = output_of(2, ROOT / "examples" / "train_ranks.py", *words)
    assert re.findall(r"^(step \d: .*) bits", shared, re.M) == alone


def test_ranks_share_the_rows_of_a_transformers_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "1024", "--window", "64", "--steps", "3", "--save", str(tmp_path)]
    alone = example("train_context_parallel").main(words)
    shared = output_of(2, ROOT / "examples" / "train_context_parallel.py", *words)
    losses = re.findall(r"'loss': '?([\d.]+)", shared)
    assert [float(loss) for loss in losses] == pytest.approx(alone, abs=1e-3)
    assert re.findall(r"^causal & window\(63\): receives ([\d,]+)", shared, re.M) == ["65,536"]


def test_a_run_continues_where_it_was_saved(tmp_path: Path) -> None:
    words = [str(tmp_path), "--context", "256", "--pattern", "window(32)", "--steps", "4"]
    whole = example("train_elastic").main(words)
    shutil.rmtree(tmp_path / "4")
    assert example("train_elastic").main(words) == {step: whole[step] for step in (3, 4)}
    assert whole[4] < whole[1]


def test_ranks_share_weights_and_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "512", "--window", "64", "--steps", "3", "--accumulate", "2", "--clip", "1"]
    assert example("train_fsdp").main([*words, "--shard", "ddp"]) < 7.5
    alone = re.findall(r"^(step \d: .*),", capsys.readouterr().out, re.M)
    assert len(alone) == 3
    shared = output_of(4, ROOT / "examples" / "train_fsdp.py", *words, "--cp", "2", "--shard", "hsdp", "--checkpoint")
    assert re.findall(r"^(step \d: .*),", shared, re.M) == alone


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_lora_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    def weights(name: str, *steps: str) -> dict[str, Tensor]:
        for count in steps:
            words = ["--context", "512", "--window", "64", "--steps", count, "--save", str(tmp_path / name)]
            assert example("finetune_lora").main(words) < 6
        return load_file(tmp_path / name / "adapter_model.safetensors")

    whole, resumed = weights("whole", "6"), weights("resumed", "5", "6")
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())
    torch.manual_seed(0)
    model = use_ringtile(example("finetune_lora").new_model(None, 512), Window(64) | GlobalTokens(4)).eval()
    rows = example("finetune_lora").rows_of(example("finetune_lora").read_text(None), None, 512)
    before = model(rows[:1], labels=rows[:1]).loss
    from peft import PeftModel

    trained = PeftModel.from_pretrained(model, tmp_path / "whole")
    assert trained(rows[:1], labels=rows[:1]).loss < before - 0.05


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("words", [["--context", "16384"], ["--context", "512", "--bf16"]], ids=" ".join)
def test_lora_trains_on_long_rows_and_in_bfloat16(words: list[str], tmp_path: Path) -> None:
    words = [*words, "--window", "256", "--steps", "1", "--save", str(tmp_path)]
    assert example("finetune_lora").main(words) < 6


def test_indexers_are_trained_saved_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--context", "256", "--keys", "40", "--dim", "8", "--rows", "32", "--warm-up", "12", "--steps", "4"]
    saved = tmp_path / "indexers.pt"
    curve = example("train_indexer").main([*small, "--save", str(saved), "--plot", str(tmp_path / "curve.png")])
    warm = [loss for _, kind, loss in curve if kind == "held out"]
    assert warm[-1] < warm[0] - 0.005
    assert (tmp_path / "curve.png").stat().st_size > 9000
    assert re.search(r"^40 keys, shared out: (\d+ \d+), (\d+ \d+)$", capsys.readouterr().out, re.M)
    # Weights that were saved begin where they ended, and LoRA trains the model beside them.
    further = "--lora 2 --warm-up 0 --steps 1 --judge 40 --judge-tokens 512".split()
    again = example("train_indexer").main([*small, "--load", str(saved), *further])
    assert again[0][2] == pytest.approx(min(loss for _, kind, loss in curve if "chosen" in kind), abs=1e-3)
    assert re.search(
        r"^40 keys, density 0.1[45]\d: text / copy / needles kept, % \(worst\): [\d.]+ ", capsys.readouterr().out, re.M
    )


def test_packed_documents_train_by_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in ("2", "3"):
        words = ["--tokens", "1024", "--window", "64", "--steps", steps, "--save", str(tmp_path)]
        assert abs(example("train_accelerate").main(words)) < 2e-6
    assert re.findall(r"^step (\d)", capsys.readouterr().out, re.M) == ["1", "2", "3"]
    from transformers import AutoModelForCausalLM

    register()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ringtile")
    assert model.config.sliding_window == 64


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [
        example("train_lightning").main(
            ["--context", "512", "--window", "64", "--steps", steps, "--save", str(tmp_path)]
        )
        for steps in ("3", "5")
    ]
    assert losses[1] < losses[0] < 5.5
    assert re.findall(r"^step (\d)", capsys.readouterr().out, re.M) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_shown_on_a_page_and_run_here(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "how-to").glob("*.md")]
    assert any(f'--8<-- "examples/{name}.py"' in page for page in pages)
    assert f'example("{name}").main(' in Path(__file__).read_text(encoding="utf-8")
