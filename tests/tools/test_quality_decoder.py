"""The decoder leg of `ringtile quality`: sequences with a far copy, calibration by head, cells of a small model."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from ringtile import cli
from ringtile.adaptive import (
    AdaptiveAttention,
    Blend,
    Calibration,
    Controller,
    Density,
    Probe,
    Recent,
    Sum,
)
from ringtile.adaptive.choice import DEFAULT_SCORES
from ringtile.integrations.transformers import calibrate, use_ringtile
from ringtile.patterns import Causal, Pattern, Window
from ringtile.tools.hf.models import load_model
from ringtile.tools.progress import Progress
from ringtile.tools.quality import decoder as decoder_module, leg as leg_module, texts as texts_module
from ringtile.tools.quality.calibrate import run
from ringtile.tools.quality.cells import Cell, Folder, Job, Measured, Record, Setting, measure_all
from ringtile.tools.quality.decoder import Decoder, faster_dtype
from ringtile.tools.quality.leg import (
    QUICK,
    SAFE,
    Leg,
    Variant,
    add_arguments,
    checked,
    open_leg,
    table,
)
from ringtile.tools.quality.texts import Texts, far_repeat
from ringtile.tools.quality.watched import Watched

N = 512
SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def bytes_of(text: str) -> list[int]:
    return list(text[:30_000].encode())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A random model whose attention is far from even."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(SIZES))
    load_model(None, folder, N)[1].save_pretrained(folder)
    made = Decoder(str(folder), N, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(8)
    return made


@pytest.fixture(scope="module")
def calibration(tiny: Decoder) -> Calibration:
    return calibrate(tiny.model, tiny.texts.calibration(0, N, tiny.vocab_size).ids)


def test_a_far_copy_repeats_its_first_fifth_and_asks_for_its_needles() -> None:
    texts = Texts(bytes_of)
    n_tokens = 2048
    for seed in range(4):
        drawn = texts.far_copy(seed, n_tokens)
        assert drawn.kinds[0] == texts.sources[seed % 4]
        ids, words = drawn.ids[0], bytes(drawn.ids[0].tolist()).decode("latin-1")
        assert (drawn.ids.shape, drawn.repeat) == ((1, n_tokens), n_tokens // 5)
        sentences = re.findall(r"\nThe secret number of (\w+) is (\d{5})\.", words)
        needles, questions = (sentences[: len(sentences) // 2], sentences[len(sentences) // 2 :])
        # A byte is a token here, so an eighth of the sequence has room for 6 needles and not 20.
        assert len(dict(needles)) == len(needles) >= 6
        assert (dict(questions), questions != needles) == (dict(needles), True)
        asked = words.index(f"\nThe secret number of {questions[0][0]} is", words.rindex(needles[-1][1], 0, -500))
        again = asked - drawn.repeat
        assert torch.equal(ids[: drawn.repeat], ids[again:asked])
        # What is judged is in its own part, and the next token, too. Needles and questions are no prose.
        assert torch.equal(drawn.first + 1, torch.arange(1, drawn.repeat))
        assert torch.equal(drawn.second + 1, torch.arange(again + 9, asked))
        taken = [range(*found.span()) for found in re.finditer(r"\nThe secret number of \w+ is \d{5}\.", words)]
        prose = {*drawn.between.tolist()} | {position + 1 for position in drawn.between.tolist()}
        assert not prose & {position for places in taken for position in places}
        answers = "".join(words[position + 1] for position in drawn.answers.tolist())
        assert answers == "".join(digits for _, digits in questions)
        for places, question in zip(taken[len(needles) :], questions, strict=True):
            distance = places.start - taken[needles.index(question)].start
            assert n_tokens // 4 <= distance <= n_tokens * 4 // 5 + n_tokens // 8
    assert torch.equal(drawn.ids, Texts(bytes_of).far_copy(3, n_tokens).ids)


@pytest.mark.parametrize("joined", [1, 2, 3, 9])
def test_answers_are_the_tokens_that_hold_digits(joined: int) -> None:
    """A tokenizer can join digits, and a space with them."""
    vocabulary: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        words = re.findall(rf" ?\d{{1,{joined}}}|\D", text)
        return [vocabulary.setdefault(word, len(vocabulary)) for word in words]

    drawn = Texts(encode).far_copy(0, 2048)
    asked = int(drawn.second.max()) + 2
    words = list(vocabulary)
    expected = [at for at in range(asked, 2048) if any(map(str.isdigit, words[int(drawn.ids[0, at])]))]
    assert (drawn.answers + 1).tolist() == expected
    assert len(expected) >= 6


def test_calibration_reads_other_files_and_has_a_far_repeat_of_random_tokens() -> None:
    assert not {*texts_module._CODE, *texts_module._DOCUMENTED} & set(texts_module._CALIBRATION)
    texts = Texts(lambda text: list(text.encode()))
    whole = bytes(texts.tokens("calibration").tolist())
    for kind in texts.sources:
        words = bytes(texts.tokens(kind).tolist())
        assert not any(words[at : at + 200] in whole for at in range(0, len(words) - 200, 997))
    drawn = texts.calibration(1, N, 256)
    assert drawn.kinds == ("random tokens", "calibration")
    repeated = far_repeat(drawn.ids[0])
    assert repeated[-128:].all()
    assert not repeated[:-128].any()
    assert len(drawn.ids[0, :128].unique()) > 70


def test_budgets_of_another_model_block_or_scores(tiny: Decoder, calibration: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "budgets.json"
    calibration.save(file)
    found = checked(Calibration.load(file), tiny, DEFAULT_SCORES, 16)
    assert [attend.choice.budget for attend in found.attention(0.25)] == [
        attend.choice.budget for attend in calibration.attention(0.25)
    ]
    for scores, block in ((SAFE, 16), (Sum(Probe(2)), 16), (DEFAULT_SCORES, 32)):
        with pytest.raises(ValueError, match="calibration: expected scores, block, first and local"):
            checked(found, tiny, scores, block)
    weight = tiny.model.model.layers[1].mlp.up_proj.weight
    before = weight.detach().clone()
    del tiny.facts
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(ValueError, match="calibration: it is of a model with weights_sha256="):
        checked(found, tiny, DEFAULT_SCORES, 16)
    with torch.no_grad():
        weight.copy_(before)
    del tiny.facts


def test_the_hash_of_the_weights_does_not_depend_on_their_dtype(tiny: Decoder) -> None:
    expected = dict(tiny.facts)
    del tiny.facts
    tiny.model.to(torch.bfloat16)
    assert tiny.facts == expected
    tiny.model.to(torch.float32)


def test_losses_are_those_of_the_model(tiny: Decoder) -> None:
    ids = tiny.texts.far_copy(0, N).ids
    tiny.model.set_attn_implementation("eager")
    places = torch.tensor([3, 200, N - 2])
    with torch.no_grad():
        logits = tiny.model(ids).logits[0].double()
    expected = -logits.log_softmax(1)[places, ids[0, places + 1]]
    found, right = tiny.losses(ids, places)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(right, logits.argmax(1)[places] == ids[0, places + 1])
    # The likeliest tokens are all right.
    ids[0, 4] = logits[3].argmax()
    assert tiny.losses(ids[:, :5], torch.tensor([3]))[1].all()


def test_watched_attention_is_the_attention(tiny: Decoder) -> None:
    ids = tiny.texts.far_copy(1, N).ids
    attend = AdaptiveAttention(budget=Density(0.3), block=16)
    use_ringtile(tiny.model, attend=attend)
    places = torch.arange(N - 1)
    expected, _ = tiny.losses(ids, places)
    watched = [Watched(attend, 32) for _ in range(tiny.layers)]
    use_ringtile(tiny.model, attend=watched)
    assert torch.equal(tiny.losses(ids, places)[0], expected)
    for each in watched:
        assert len(each.density) == 1
        assert 0.3 < each.density[0] < 0.4
        assert each.recall[0].shape == (4,)
        assert 0.3 < float(each.recall[0].mean()) < 1


def test_cells_of_a_run(tiny: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg = Leg(tiny, tmp_path, block=16)
    jobs = list(leg.jobs(quick=True, timed=False))
    assert len({job.setting.name for job in jobs}) == len(jobs)
    folder = Folder(tmp_path)
    cells = measure_all(jobs, folder, Progress(quiet=True))
    losses = [cell for cell in cells if cell.setting.task == "far copy"]
    assert len(losses) == 4 * (1 + len(QUICK))
    assert {cell.setting.sizes["text"] for cell in losses} == set(tiny.texts.sources)
    for cell in losses:
        text, copy = cell.figure("text"), cell.figure("copy")
        assert text is not None
        assert copy is not None
        if cell.setting.scores == "dense":
            assert (text, copy, cell.measured.realised) == (1, 1, 1)
            assert cell.figure("needles") in (1, None)
        else:
            assert 0.5 < text < 1.5
            assert math.isfinite(copy)
            assert (cell.figure("probed") or 0) == pytest.approx(
                0 if cell.setting.scores == "window" else 4 / 16, rel=0.02
            )
            assert 0 <= (cell.figure("digits") or 0) <= 1
            assert 0.2 < (cell.measured.realised or 0) < 0.4
    # Nothing is measured twice, and the calibration is read from its file.
    monkeypatch.delattr(leg_module, "calibrate")
    again = measure_all(Leg(tiny, tmp_path, block=16).jobs(quick=True, timed=False), folder, Progress(quiet=True))
    assert again == cells


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(words)


def test_a_missing_model_is_one_line_with_the_way_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quality", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--model: expected your model, or --calibrate" in line
    progress = Progress(quiet=True)
    with pytest.raises(ValueError, match=r"none\.gguf"):
        open_leg(arguments("--model", str(tmp_path / "none.gguf")), tmp_path, progress)
    with pytest.raises(ValueError, match="--text: expected a text file"):
        open_leg(arguments("--model", "none.gguf", "--text", str(tmp_path / "none.txt")), tmp_path, progress)


def test_calibrate_from_the_command_line(tiny: Decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "model", tmp_path / "budgets.json"
    tiny.model.save_pretrained(model)
    words = ("--calibrate", str(model), "--tokens", str(N), "--block", "16", "--dtype", "float32", "--density", "0.4")
    assert run(arguments(*words, "--out", str(out)), Progress()) == 0
    assert "for 0.4, recall 0." in capsys.readouterr().out
    # Another process reads the same weights, in another dtype, and the same budgets.
    words = ("--model", str(model), "--tokens", str(N), "--block", "16", "--dtype", "bfloat16", "--budgets", str(out))
    jobs = open_leg(arguments(*words, "--quick"), tmp_path, Progress(quiet=True))
    assert {job.setting.sizes["dtype"] for job in jobs} == {"bfloat16"}
    with pytest.raises(ValueError, match="--density: expected a number above 0"):
        run(arguments("--calibrate", str(model), "--density", "0"), Progress(quiet=True))


def test_the_command_writes_a_record_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"model": "<m>", "tokens": 64, "block": 16, "dtype": "float32"}
    setting = Setting("decoder", "far copy", "post-hoc", "default", "density", 0.25, 0, sizes)
    job = Job(setting, 1.0, lambda: Measured({"text": 0.97, "copy": 0.9}, 0.26))
    monkeypatch.setattr(leg_module, "open_leg", lambda args, folder, progress: [job])
    words = ["quality", "--model", "m", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    record = Record.from_json((tmp_path / "quality.json").read_text())
    assert (record.command, record.cells[0].setting) == (f"ringtile {' '.join(words)}", setting)
    table = (tmp_path / "quality.txt").read_text()
    assert table in shown
    jobs = [job, replace(job, setting=replace(setting, seed=1), measure=stopped)]
    monkeypatch.setattr(leg_module, "open_leg", lambda args, folder, progress: jobs)
    assert cli.main(words) == 130
    assert (tmp_path / "quality.txt").read_text() == f"{table}\nThis run was interrupted. Cells are missing.\n"


def stopped() -> Measured:
    raise KeyboardInterrupt


def test_seconds_beside_dense(tiny: Decoder, tmp_path: Path) -> None:
    leg = Leg(tiny, tmp_path, block=16)
    jobs = [job for job in leg.jobs() if job.setting.task == "prefill"]
    found = [(job.setting.budget, job.setting.sizes["tokens"]) for job in jobs]
    kinds = ["calibrated"] * 3 + ["quality"]
    assert found == [*((budget, N) for budget in kinds), *((budget, 2 * N) for budget in kinds[:2])]
    (quick,) = (job for job in leg.jobs(quick=True) if job.setting.task == "prefill")
    assert quick.setting == jobs[0].setting
    figures = jobs[3].measure().figures
    ratios = figures["ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 3
    assert min(ratios) <= figures["ratio"] <= max(ratios)  # type: ignore[operator]


def test_the_table_shows_each_cell() -> None:
    def cell(task: str, scores: str, asked: float | None, text: str, measured: Measured) -> Cell:
        sizes = {"model": "m.gguf", "tokens": 4096, "block": 32, "dtype": "float32", "text": text}
        budget = "calibrated" if scores == "default" else "density"
        return Cell(Setting("decoder", task, "post-hoc", scores, budget, asked, 0, sizes), measured, 1.0)

    def kept(text: float, needles: float | None, worst_head: float) -> dict[str, float]:
        figures = {"text": text, "copy": 0.9, "recall": 0.85, "worst_head": worst_head, "probed": 0.125}
        return figures if needles is None else {**figures, "needles": needles}

    seconds = Measured({"seconds": 3.0, "dense_seconds": 4.0, "ratio": 0.75})
    shown = table(
        [
            cell("far copy", "dense", None, "code", Measured({"text": 1.0, "digits": 0.9}, 1.0)),
            cell("far copy", "default", 0.25, "code", Measured(kept(0.98, 0.8, 0.3), 0.25)),
            # The mean of a text counts as one text: 99% and 97% are 98%.
            cell("far copy", "default", 0.25, "novel", Measured(kept(0.99, 0.9, 0.2), 0.27)),
            cell("far copy", "default", 0.25, "novel", Measured(kept(0.95, None, 0.4), 0.26)),
            cell("far copy", "default", 0.02, "code", Measured(kept(0.5, 0.1, 0.1), 0.046)),
            cell("prefill", "default", 0.25, "", seconds),
        ]
    )
    rows = [line.split() for line in shown]
    # Densities, then means and worst texts, and the seconds of the same length.
    kept = ["97.5", "(97.0)", "90.0", "(90.0)", "85.0", "(80.0)", "85.0", "(20.0)"]
    assert rows[4] == ["default", "calibrated", "25%", "0.260", "0.385", *kept, "3.00", "4.00", "0.75"]
    assert rows[5][:5] == ["-", "default", "calibrated", "2%", "0.046"]
    assert shown[6] == "- below the floor of 4.6%"


def test_probes_count_as_the_pairs_that_they_compute() -> None:
    for scores, expected in (
        (Probe(2), 2 / 32),
        (Sum(Probe(4), Blend()), 4 / 32),
        (Recent(), 0),
        (Probe("first"), 1 / 32),
    ):
        found = probed(AdaptiveAttention(scores, Density(0.1), block=32))
        assert found == pytest.approx(expected, rel=0.04)
    # A controller computes 64 rows more.
    held = probed(AdaptiveAttention(Recent(), Controller(0.9), block=32))
    assert held == pytest.approx(64 / 1024, rel=0.2)
    # The default multiplies all 1024 * 1025 / 2 pairs by numbers of a quarter of the bits, and a controller 64 rows.
    assert probed(AdaptiveAttention(budget=Density(0.1), block=32)) == 0.25
    assert probed(AdaptiveAttention(budget=Controller(0.9), block=32)) == pytest.approx(0.25 + held, rel=1e-6)
    # In a window of 40, rows of tiles of 32 have one tile, then 2, then 3, and these are multiplied exactly.
    windowed = probed(AdaptiveAttention(budget=Density(0.1), block=32), Causal() & Window(40))
    assert windowed == pytest.approx(32 * 32 * (1 + 2 + 30 * 3) / 1024**2)


def probed(attend: AdaptiveAttention, pattern: Pattern | None = None) -> float:
    """The part of the pairs that a causal choice computes."""
    q, k, v = torch.randn(3, 1, 3, 1024, 8, generator=torch.Generator().manual_seed(0)).unbind()
    watched = Watched(attend)
    watched(q, k, v, pattern, is_causal=True)
    return watched.probed[0]


@pytest.mark.parametrize(("seconds", "expected"), [((1, 2), torch.float32), ((2, 1), torch.bfloat16)])
def test_the_faster_dtype(seconds: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first of four times does not count.
    times = iter([9, *[seconds[0]] * 3, 0, *[seconds[1]] * 3])
    monkeypatch.setattr(decoder_module, "seconds_of", lambda call: next(times))
    assert faster_dtype() == expected


def test_texts_of_yours(tmp_path: Path) -> None:
    def texts(*names: str) -> Texts:
        return Texts(lambda text: list(text.encode()), [tmp_path / name for name in names])

    generator = torch.Generator().manual_seed(0)
    letters = bytes((torch.randint(26, (3000,), generator=generator) + 97).tolist())
    (tmp_path / "own.txt").write_bytes(letters)
    (tmp_path / "other.md").write_bytes(letters.upper())
    both = texts("own.txt", "other.md")
    assert [both.far_copy(seed, N).kinds[0] for seed in range(3)] == ["own", "other", "own"]
    assert bytes(both.far_copy(1, N).ids[0, :100].tolist()).isupper()
    # A folder stands for its files, in the order of their names.
    assert texts("").sources == ("other", "own")
    assert both.calibration(0, N, 256).kinds == ("random tokens", "own and other")
    (tmp_path / "own.txt").write_bytes(letters[:300] + letters[:300])
    drawn = texts("own.txt").calibration(0, N, 256)
    assert (drawn.kinds, bytes(drawn.ids[0].tolist())) == (("own", "own"), (letters[:300] * 2)[:N])
    with pytest.raises(ValueError, match="--text: expected at least 3000 tokens of own, got 600"):
        texts("own.txt").calibration(0, 6000, 256)
    (tmp_path / "latin").write_bytes(b"\xe9")
    for names, message in (
        (["none.txt"], "expected a text file"),
        (["latin"], "expected UTF-8"),
        (["own.txt", "sub/../own.txt"], "expected files of different names"),
    ):
        (tmp_path / "sub").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"--text: {message}"):
            texts(*names)


def test_a_text_of_yours_judges_and_does_not_calibrate(
    tiny: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("0123456789" * 100)
    before = next(Leg(tiny, tmp_path, block=16).jobs()).setting
    monkeypatch.setattr(tiny, "texts", Texts(tiny.encode, [own]))
    assert tiny.texts.far_copy(0, N).kinds[0] == "own"
    # Each of your texts is another cell, also if a folder has the cells of others, and at least four are measured.
    setting = next(Leg(tiny, tmp_path, block=16).jobs()).setting
    assert (setting.sizes["text"], setting.name != before.name) == ("own", True)
    jobs = [job.setting for job in Leg(tiny, tmp_path, block=16).jobs(timed=False) if job.setting.scores == "dense"]
    assert [job.seed for job in jobs] == [0, 1, 2, 3]
    monkeypatch.setattr(tiny.texts, "_known", {"own": torch.zeros(100)})
    with pytest.raises(ValueError, match=r"--text: expected at least \d+ tokens of own, got 100"):
        next(Leg(tiny, tmp_path, block=16).jobs())
    monkeypatch.setattr(tiny.texts, "_known", {})
    found = Leg(tiny, tmp_path, block=16).calibration(DEFAULT_SCORES).text["sha256"]
    assert found == Texts(tiny.encode).calibration(0, N, tiny.vocab_size).sha256


def test_a_full_budget_loses_nothing(tiny: Decoder, tmp_path: Path) -> None:
    found = Leg(tiny, tmp_path, block=16).losses(Variant("default", "density", 1.0), 0)
    assert found.figures["text"] == pytest.approx(1, abs=1e-4)
    assert found.figures["recall"] == pytest.approx(1, abs=1e-6)
    assert found.realised == 1
