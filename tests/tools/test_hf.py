"""`ringtile hf`: a tiny model with random weights, its check, its losses, and what is refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BIASED, DECODER, MODELS, hf as transformers

from ringtile import cli
from ringtile.integrations.transformers import registry
from ringtile.integrations.transformers.attention import attend
from ringtile.patterns import Causal, Pattern, Window
from ringtile.tools.hf import check

MISTRAL = {**DECODER, "model_type": "mistral", "sliding_window": 40}
SHORT = ["--tokens", "150", "--rounds", "1", "--peers", "sdpa"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Steps of generation take most of the time.
    monkeypatch.setattr(check, "NEW_TOKENS", 8)
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    return tmp_path


def record_of(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    assert cli.main(["hf", *words, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_model_is_checked_and_measured(config, capsys):
    words = ["--random-weights", str(config), *SHORT, "--pattern", "window(9) | global_tokens(2)"]
    record = record_of(words, capsys)
    sdpa, ours, sparse = record["entrants"]
    assert [entrant["peer"] for entrant in record["entrants"]] == ["sdpa", "ringtile", "ringtile"]
    assert record["checked_tokens"] == 150
    for entrant in (ours, sparse):
        checked = [(check["what"], check["tokens"]) for check in entrant["checks"]]
        assert checked == [("logits", 150), ("gradients", 150)]
        assert all(check["error"] <= 1e-6 < check["bound"] for check in entrant["checks"])
        assert (entrant["same_tokens"], entrant["greedy_tokens"]) == (8, 8)
    assert ours["loss"] == pytest.approx(sdpa["loss"], abs=1e-6)
    assert abs(sparse["loss"] - sdpa["loss"]) > 1e-5
    for entrant in record["entrants"]:
        assert list(entrant["passes"]) == ["prefill", "training"]
        for timing in entrant["passes"].values():
            assert len(timing["seconds"]) == 1
            assert timing["peak_bytes"] > 0
    assert sparse["pattern"] == "window(9) | global_tokens(2)"
    assert record["versions"]["transformers"] == transformers.__version__


def test_the_loss_is_that_of_the_model(config, capsys, tmp_path):
    text = tmp_path / "text"
    text.write_text("The quick brown fox. " * 10)
    words = ["--random-weights", str(config), *SHORT, "--text", str(text), "--passes", "prefill"]
    record = record_of(words, capsys)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config)).eval()
    ids = torch.tensor([[byte % 97 for byte in text.read_bytes()[:150]]])
    expected = float(model(ids, labels=ids).loss.detach())
    assert [entrant["loss"] for entrant in record["entrants"]] == pytest.approx([expected] * 2, abs=1e-5)


def test_a_folder_and_a_gguf_file_are_loaded(config, capsys, monkeypatch):
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config))
    model.save_pretrained(config / "saved")
    words = [*SHORT, "--passes", "prefill", "--text", __file__]
    record = record_of([str(config / "saved"), *words], capsys)
    assert record["text"] == f"{__file__}, one token per byte"
    calls = []

    def load_gguf(folder: str, gguf_file: str, **options: Any) -> Any:
        calls.append((folder, gguf_file))
        if options:
            return model.from_pretrained(config / "saved", **options)
        raise OSError("no tokenizer")

    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", load_gguf)
    (config / "model.gguf").touch()
    again = record_of([str(config / "model.gguf"), *words], capsys)
    assert calls == [(str(config), "model.gguf")] * 2
    assert again["model"].startswith("model.gguf: MistralForCausalLM")
    for before, after in zip(record["entrants"], again["entrants"], strict=True):
        assert before["loss"] == after["loss"]


def with_mask(fault: Pattern) -> Any:
    """An adapter that reads another pattern from the model's mask."""

    def wrong(pattern: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        before = mask.kept
        mask.kept = before._replace(pattern=fault)
        found = attend(pattern, module, query, key, value, mask, **options)
        mask.kept = before
        return found

    return wrong


def without_pattern(pattern: Any, *call: Any, **options: Any) -> Any:
    return attend(None, *call, **options)


def without_gradient(pattern: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    return attend(pattern, module, query, key.detach(), value, mask, **options)


@pytest.mark.parametrize(
    ("wrong", "words", "what"),
    [
        (with_mask(Causal()), [], "ringtile: wrong: error .* logits"),
        # Rounding to bfloat16 hides one key too many.
        (with_mask(Causal() & Window(40)), ["--dtype", "bfloat16"], "ringtile: wrong: error .* logits"),
        (without_pattern, ["--pattern", "window(9)"], "ringtile, --pattern: wrong: error .* logits"),
        (without_gradient, [], "ringtile: wrong: error .* gradients"),
    ],
    ids=["mask", "one too wide", "pattern", "gradients"],
)
def test_a_wrong_adapter_fails_the_check_and_is_not_timed(
    config, capsys, monkeypatch, wrong, words,
    what
):  # fmt: skip
    monkeypatch.setattr(registry, "attend_layer", wrong)
    argv = ["hf", "--random-weights", str(config), *SHORT, *words]
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"ringtile hf: {what}, over \S+\n", err)
    assert "loss" not in out
    assert "prefill" not in out
    # Without a backward pass, gradients do not matter.
    assert cli.main([*argv, "--passes", "prefill"]) == (0 if wrong is without_gradient else 1)


def test_another_dtype_is_checked_in_float32_first(config, capsys):
    assert cli.main(["hf", "--random-weights", str(config), *SHORT, "--dtype", "bfloat16"]) == 0
    lines = re.findall(r"^ringtile: (\w+) of .*, (\w+)$", capsys.readouterr().out, re.M)
    assert lines == [(what, name) for name in ("float32", "bfloat16") for what in ("logits", "gradients")]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "MODEL: expected a model or --random-weights CONFIG, got neither"),
        (["somewhere", "--random-weights", "there"], "MODEL: expected a model or --random-weights CONFIG, got both"),
        (["--random-weights", "there"], "--random-weights: expected a config.json or its folder, got 'there'"),
        (["owner/model"], "MODEL: 'owner/model' is no local file or folder, and the hub gave none: "),
        (["EMPTY"], "MODEL: "),
        (["--random-weights", "EMPTY"], "--random-weights: "),
        (["--random-weights", "CONFIG", "--out", "x.txt"], "--out: expected a file name ending in .png, .svg, .pdf"),
        (["--random-weights", "CONFIG", "--tokens", "1"], "--tokens: expected at least 2, got 1"),
        (["--random-weights", "CONFIG", "--tokens", "1K"], "--tokens: expected at most 512, the model's max_position_"),
        (["--random-weights", "CONFIG", "--tokens", "9", "--text", "no"], "--text: expected a text file, got 'no'"),
        (["--random-weights", "CONFIG", "--tokens", "99", "--text", "SHORT"], "--tokens: expected at most 5, the len"),
        (["--random-weights", "CONFIG", "--tokens", "60", "--pattern", "~window(9)"], "--pattern: expected a key for"),
    ],
)
def test_bad_input_is_one_line(config, tmp_path, capsys, words, complaint):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("abcde")
    names = {"CONFIG": config, "EMPTY": tmp_path / "empty", "SHORT": tmp_path / "short"}
    assert cli.main(["hf", *(str(names.get(word, word)) for word in words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"ringtile: error: {complaint}")


def test_a_name_is_asked_for_once(capsys, monkeypatch):
    asked, loads = [], []

    def out_of_reach(self: Any, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("no network")

    def load(source: str, **options: Any) -> None:
        loads.append(options["local_files_only"])
        raise OSError("stop")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", out_of_reach)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", load)
    wanted = "MODEL: 'owner/model' is no local file or folder, and the hub gave none"
    assert cli.main(["hf", "owner/model"]) == 2
    assert capsys.readouterr().err == f"ringtile: error: {wanted}: no network\n"
    assert (asked, loads) == ([("owner/model", 10.0)], [])
    # A name in the cache is loaded from there.
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: file)
    assert cli.main(["hf", "owner/model"]) == 2
    assert capsys.readouterr().err == f"ringtile: error: {wanted}: stop\n"
    assert loads == [True]


KINDS = {"T5": 8, "Whisper": None, "ModernBERT": None, "DeBERTa-v2": None}
SPEECH = "Parakeet", "WavLM"
KINDS |= dict.fromkeys(SPEECH)
"""Models that are no decoders alone, and how many tokens they generate from a text."""


def written(name: str, folder: Path, with_class: bool = True) -> str:
    """Write the config of a model, and return the name of its class."""
    made, config = (BIASED | MODELS)[name]()
    config.architectures = [made.__name__] if with_class else None
    config.save_pretrained(folder)
    return str(made.__name__)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
def test_every_kind_of_model_is_checked_and_measured(name, config, capsys):
    kind = written(name, config)
    record = record_of(["--random-weights", str(config), "--tokens", "90", "--rounds", "1", "--peers", "eager"], capsys)
    assert f": {kind}, " in record["model"]
    of_text = "Python's documentation (pydoc_data.topics), one token per byte"
    assert record["text"] == {"Whisper": f"random sound, and {of_text}"}.get(
        name, "random sound" if name in SPEECH else of_text
    )
    eager, ours = record["entrants"]
    assert [check["what"] for check in ours["checks"]] == ["outputs", "gradients"]
    assert all(check["error"] <= 5e-6 < check["bound"] for check in ours["checks"])
    # Something differs from eager attention, so ringtile has run.
    assert any(check["error"] > 0 for check in ours["checks"])
    assert (ours["same_tokens"], ours["greedy_tokens"]) == (KINDS[name], KINDS[name])
    assert ours["loss"] is None
    for timing in (*eager["passes"].values(), *ours["passes"].values()):
        assert len(timing["seconds"]) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("T5", "T5ForConditionalGeneration"),
        ("RoBERTa", "RobertaForMaskedLM"),
        ("Whisper", "WhisperForConditionalGeneration"),
    ],
)
def test_a_model_without_a_class_has_the_first_that_fits(name, kind, tmp_path, capsys):
    written(name, tmp_path, with_class=False)
    words = ["--random-weights", str(tmp_path), "--tokens", "40", "--rounds", "1", "--peers", "--passes", "prefill"]
    assert f": {kind}, " in record_of(words, capsys)["model"]


def test_weights_of_an_encoder_are_loaded(tmp_path, capsys):
    made, config = MODELS["RoBERTa"]()
    model = made._from_config(config)
    model.roberta.save_pretrained(tmp_path)
    words = [str(tmp_path), "--tokens", "40", "--rounds", "1", "--peers", "--passes", "prefill"]
    assert ": RobertaModel, " in record_of(words, capsys)["model"]


@pytest.mark.parametrize(
    ("name", "words", "complaint"),
    [
        ("ViT", [], "MODEL: expected one that reads text, spectra or samples, got ViTModel, pixel_values"),
        ("Whisper", ["--tokens", "150"], "MODEL: refused 150 tokens: "),
        ("T5", ["--pattern", "window(9)"], "pattern: expected a function of the attention module for a model with"),
        ("DeBERTa-v2", ["--pattern", "window(9)"], "--pattern: expected a model that asks transformers for its masks"),
    ],
)
def test_what_a_kind_of_model_cannot_do_is_one_line(name, words, complaint, tmp_path, capsys):
    written(name, tmp_path)
    assert cli.main(["hf", "--random-weights", str(tmp_path), "--tokens", "40", "--passes", "prefill", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"ringtile: error: {complaint}")


def test_a_pattern_of_an_encoder_is_measured(config, capsys):
    written("ModernBERT", config)
    words = ["--random-weights", str(config), "--tokens", "90", "--rounds", "1", "--peers", "--pattern", "window(5)"]
    ours, sparse = record_of(words, capsys)["entrants"]
    for check_of in (ours["checks"], sparse["checks"]):
        assert all(check["error"] <= 5e-6 for check in check_of)


def test_a_model_without_attention_is_one_line(tmp_path, capsys):
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", **sizes}))
    assert cli.main(["hf", "--random-weights", str(tmp_path), "--tokens", "9"]) == 2
    complaint = "--random-weights: expected a model with attention, got MambaForCausalLM"
    assert capsys.readouterr().err == f"ringtile: error: {complaint}\n"


def test_transformers_is_named_if_it_is_missing_and_only_asked_for_when_it_is_needed(config):
    # A process of its own: modules imported anew here would stay beside those that other tests patch.
    program = (
        "import sys; sys.modules['transformers'] = None; from ringtile import cli; "
        "assert cli.parse(['hf', 'm']).model == 'm'; "
        "sys.exit(cli.main(['hf', '--random-weights', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(config)], text=True, capture_output=True, check=False)
    assert done.returncode == 2
    assert "pip install 'transformers>=5.5,<6'" in done.stderr
