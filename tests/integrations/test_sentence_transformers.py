"""Saved models of sentence-transformers on ringtile: embeddings, rerankers, ragged batches, the how-to page."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import randomized, registered
from oracle import refused
from test_docs import snippets
from tiny import DECODER, ENCODER, MODELS, Lazily, hf

from ringtile.integrations.transformers import use_ringtile

pytestmark = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)
st: Any = Lazily("sentence_transformers")
modules: Any = Lazily("sentence_transformers.sentence_transformer.modules")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "embeddings.md"
TEXTS = ["a b c", "d e f g " * 40, "x", "y z " * 33, "q r s " * 60]
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SIZES = dict(ENCODER, attention_window=16)
CONFIGS = {
    "ModernBERT": lambda: MODELS["ModernBERT"]()[1],
    "XLM-R": lambda: hf.XLMRobertaConfig(**ENCODER),
    "Qwen3": lambda: hf.Qwen3Config(**DECODER),
    "Longformer": lambda: hf.LongformerConfig(**SIZES),
    "BigBird": lambda: hf.BigBirdConfig(**ENCODER, block_size=4, num_random_blocks=2),
}
BY_HAND = ["Longformer", "BigBird"]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


def save(name: str, folder: Path, made: str = "AutoModel") -> str:
    """Save a tiny model with random weights and a tokenizer of letters, and return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {
        "single": "[CLS] $A [SEP]",
        "pair": "[CLS] $A [SEP] $B [SEP]",
        "special_tokens": [("[CLS]", 1), ("[SEP]", 2)],
    }
    letters.post_processor = processors.TemplateProcessing(**ends)
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "cls", "sep", "unk", "mask")}
    side = "left" if name == "Qwen3" else "right"
    hf.PreTrainedTokenizerFast(
        tokenizer_object=letters, model_max_length=256, padding_side=side, **special
    ).save_pretrained(folder)
    config = CONFIGS[name]()
    if made != "AutoModel":
        config.num_labels = 1
    torch.manual_seed(0)
    model = randomized(getattr(hf, made).from_config(config))
    model.save_pretrained(folder)
    if made == "AutoModel":
        # As Qwen3's embedding models pool.
        pooling = modules.Pooling(64, "lasttoken" if name == "Qwen3" else "mean")
        st.SentenceTransformer(modules=[modules.Transformer(str(folder)), pooling]).save_pretrained(str(folder))
    return str(folder)


def loaded(made: str, folder: str, implementation: str | None, dtype: torch.dtype = torch.float64) -> Any:
    options = {"dtype": dtype} | ({} if implementation is None else {"attn_implementation": implementation})
    return getattr(st, made)(folder, model_kwargs=options, device="cpu")


def precision(name: str) -> tuple[torch.dtype, float]:
    """A dtype, and a bound for differences: attention written by hand has a softmax in float32."""
    return (torch.float32, 5e-6) if name in BY_HAND else (torch.float64, 1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_are_those_of_pytorchs_attention(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    plain = None if name in BY_HAND else "sdpa"
    dtype, bound = precision(name)
    expected = loaded("SentenceTransformer", folder, plain, dtype).encode(TEXTS)
    assert expected.shape == (len(TEXTS), 64)
    if name in BY_HAND:
        with refused(r"attn_implementation='ringtile': .* call use_ringtile\(model\)"):
            loaded("SentenceTransformer", folder, "ringtile")
        model = loaded("SentenceTransformer", folder, None, dtype)
        use_ringtile(model.transformers_model)
        assert np.abs(model.encode(TEXTS) - expected).max() <= bound
        with refused(r"^pack: .* has its own, got True"):
            use_ringtile(model.transformers_model, pack=True)
        return
    model = loaded("SentenceTransformer", folder, "ringtile")
    assert model.transformers_model.config._attn_implementation == "ringtile"
    assert np.abs(model.encode(TEXTS) - expected).max() <= bound
    shapes = []
    part = next(part for part in model.modules() if isinstance(part, torch.nn.Linear) and part.in_features == 64)
    part.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    use_ringtile(model.transformers_model, pack=True)
    assert np.abs(model.encode(TEXTS) - expected).max() <= bound
    assert shapes
    assert {shape[0] for shape in shapes} == {1}


@pytest.mark.parametrize("name", ["ModernBERT", "Qwen3", "Longformer"])
def test_a_reranker_scores_as_with_pytorchs_attention(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path, "AutoModelForSequenceClassification")
    plain = None if name in BY_HAND else "sdpa"
    dtype, bound = precision(name)
    pairs = [("a b", text) for text in TEXTS]
    expected = loaded("CrossEncoder", folder, plain, dtype).predict(pairs)
    assert expected.std() > 1e-3
    model = loaded("CrossEncoder", folder, None if name in BY_HAND else "ringtile", dtype)
    if name in BY_HAND:
        use_ringtile(model.transformers_model)
    assert np.abs(model.predict(pairs) - expected).max() <= bound
    if name not in BY_HAND:
        use_ringtile(model.transformers_model, pack=True)
        assert np.abs(model.predict(pairs) - expected).max() <= bound


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, name, made in (
        ("embedder", "ModernBERT", "AutoModel"),
        ("reranker", "XLM-R", "AutoModelForSequenceClassification"),
        ("longformer", "Longformer", "AutoModel"),
    ):
        save(name, tmp_path / "path" / "to" / part, made)
    monkeypatch.chdir(tmp_path)
    first, alone, second = snippets(PAGE.read_text(encoding="utf-8"), "python")
    assert len(first.splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(compile(first, str(PAGE), "exec"), names)
    assert names["embeddings"].shape == (2, 64)
    assert names["scores"].shape == (2,)
    exec(compile(second, str(PAGE), "exec"), names)
    assert names["model"].encode(TEXTS).shape == (len(TEXTS), 64)
    # The longest text of the page takes seconds.
    exec(compile(alone.replace("4096", "1100"), str(PAGE), "exec"), names)
    torch.testing.assert_close(names["found"], names["dense"], atol=1e-5, rtol=1e-5)
    assert names["found"].shape == (4, 256)
