"""Models of Hugging Face transformers and the text that they read, from local files or the hub."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.integrations.transformers import register
from ringtile.integrations.transformers.registry import parts_of
from ringtile.tools.units import first_line

_KINDS = "Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CTC", "CausalLM", "SequenceClassification"
_FEATURES = "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"
"""Fields of configs that have the numbers of a spectrum."""


class Loaded(NamedTuple):
    """A model in float32 with eager attention, and what it reads."""

    name: str
    model: Any
    ids: Tensor
    """``[1, N]`` int64, the tokens of the text."""
    text: str
    """The source of the tokens."""

    @property
    def reads_text(self) -> bool:
        return bool(self.model.main_input_name == "input_ids")

    def inputs(self, n_tokens: int) -> dict[str, Tensor]:
        """Return the arguments of the model for the first tokens, or for as many frames of random sound."""
        ids, name = self.ids[:, :n_tokens], self.model.main_input_name
        of_text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = of_text if self.reads_text else {name: _sound(self.model, n_tokens)}
        return found | ({"decoder_input_ids": ids} if self.model.config.is_encoder_decoder else {})


def _sound(model: Any, n_frames: int) -> Tensor:
    """Return random numbers for a model of speech: spectra, or samples, several of which are a frame."""
    config, name = model.config, model.main_input_name
    configs = [config, *(part.config for part in parts_of(model))]
    sizes = [getattr(each, field) for each in configs for field in _FEATURES if hasattr(each, field)]
    shape: tuple[int, ...]
    if config.model_type == "whisper":
        # It reads half a minute at once.
        shape = 1, config.num_mel_bins, 2 * config.max_source_positions
    elif name == "input_features" and sizes:
        shape = 1, n_frames, sizes[0]
    elif name == "input_values" and hasattr(config, "inputs_to_logits_ratio"):
        shape = 1, (n_frames + 1) * config.inputs_to_logits_ratio
    else:
        raise ValueError(f"MODEL: expected one that reads text, spectra or samples, got {type(model).__name__}, {name}")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(model.dtype)


def _attempt(what: str, load: Callable[[], Any]) -> Any:
    """Return the result of a loader of transformers, or raise ValueError with one line."""
    try:
        return load()
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
        raise ValueError(f"{what}: {first_line(error)}") from None


def _quiet_transformers() -> Any:
    """Import transformers without progress bars and advice."""
    _attempt("ringtile hf needs transformers (pip install 'transformers>=5.5,<6')", register)
    import huggingface_hub
    import transformers

    # An error of theirs is raised, too.
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    huggingface_hub.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _ask_hub(name: str) -> bool:
    """Return True if the hub answers for a name, or False if the name is in the local cache, else raise ValueError."""
    # transformers asks the hub for many files, and again after each failure. A hub that is slow is out of reach.
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    try:
        HfApi().model_info(name, timeout=10.0)
    except (errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
        if not isinstance(error, ValueError) and isinstance(try_to_load_from_cache(name, "config.json"), str):
            return False
        what = f"MODEL: {name!r} is no local file or folder, and the hub gave none"
        raise ValueError(f"{what}: {first_line(error)}") from None
    return True


def attention_config(model: Any) -> Any:
    """Return the config of a model, or of its first part, that has a number of heads, or None."""
    configs = [part.config.get_text_config() for part in parts_of(model)]
    return next((config for config in configs if hasattr(config, "num_attention_heads")), None)


def _loader(transformers: Any, config: Any) -> Any:
    """Return the class of transformers that loads the class that a config names, or the first that fits it."""
    loaders = [getattr(transformers, f"AutoModelFor{kind}") for kind in _KINDS] + [transformers.AutoModel]
    fitting = [loader for loader in loaders if type(config) in loader._model_mapping]
    kinds = [getattr(loader._model_mapping[type(config)], "__name__", "") for loader in fitting]
    named = [x for x, kind in zip(fitting, kinds, strict=True) if kind in (config.architectures or ())]
    return [*named, *fitting, transformers.AutoModel][0]


def load_model(
    source: str | None, random_weights: Path | None, n_tokens: int, seed: int = 0, only_causal: bool = True
) -> tuple[str, Any, Callable[[str], list[int]] | None]:
    """Load a folder of ``save_pretrained``, a GGUF file, a name on the hub, or a ``config.json`` or its folder.

    Returns the name, the model in float32 with eager attention, and its tokenizer, if it has one.
    """
    if (source is None) == (random_weights is None):
        raise ValueError("MODEL: expected a model or --random-weights CONFIG, got " + ("both" if source else "neither"))
    if n_tokens < 2:
        raise ValueError(f"--tokens: expected at least 2, got {n_tokens}")
    if random_weights is not None and not random_weights.exists():
        raise ValueError(f"--random-weights: expected a config.json or its folder, got {str(random_weights)!r}")
    where: dict[str, Any] = {}
    if source is not None and not Path(source).exists() and find_spec("huggingface_hub"):
        # First, because the import of transformers takes seconds.
        where["local_files_only"] = not _ask_hub(source)
    transformers = _quiet_transformers()
    # Weights are cast later: the check needs them in float32.
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    loader = transformers.AutoModelForCausalLM
    if random_weights is not None:
        what, name, source = "--random-weights", f"random weights of {random_weights}", str(random_weights)
        config = _attempt(what, lambda: transformers.AutoConfig.from_pretrained(source))
        torch.manual_seed(seed)
        loader = loader if only_causal else _loader(transformers, config)
        model = _attempt(what, lambda: loader.from_config(config, **options))
    else:
        assert source is not None
        what, name = "MODEL", source
        # A GGUF file is loaded by its folder and its name. Any other file has no loader.
        path = Path(source)
        if path.is_file():
            name = path.name
            source, where = str(path.parent), {"gguf_file": path.name}
        elif not path.exists():
            what = f"MODEL: {source!r} is no local file or folder, and the hub gave none"
        if not only_causal and not path.is_file():
            config = _attempt(what, lambda: transformers.AutoConfig.from_pretrained(source, **where))
            loader = _loader(transformers, config)
        model = _attempt(what, lambda: loader.from_pretrained(source, **where, **options))
    config = attention_config(model)
    if config is None:
        raise ValueError(f"{what}: expected a model with attention, got {type(model).__name__}")
    # Beyond its positions a model computes something, but not what it was trained for.
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and n_tokens > longest and model.main_input_name == "input_ids":
        raise ValueError(f"--tokens: expected at most {longest}, the model's max_position_embeddings, got {n_tokens}")
    encode = None if random_weights is not None else _tokenizer(transformers, source, where)
    return name, model.eval(), encode


def _tokenizer(transformers: Any, source: str, where: dict[str, Any]) -> Callable[[str], list[int]] | None:
    """Return a model's own tokenizer, or None for a folder without one."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
    except (OSError, ValueError, KeyError, ImportError):
        return None

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # For some models without a tokenizer, transformers makes one that knows no letter.
    return encode if encode("a") != encode("b") else None


def load(
    source: str | None, random_weights: Path | None, n_tokens: int, text: Path | None = None, seed: int = 0
) -> Loaded:
    """Load a model, see `load_model`, and the first tokens of a text file (default: the topics of ``help()``)."""
    words, title = python_manual(), "Python's documentation (pydoc_data.topics)"
    if text is not None:
        words, title = read_text(text), str(text)
    name, model, encode = load_model(source, random_weights, n_tokens, seed, only_causal=False)
    if encode is None:
        title += ", one token per byte"
        vocab_size = getattr(model.config.get_text_config(), "vocab_size", None) or 256
        found = [byte % vocab_size for byte in words.encode()[:n_tokens]]
    else:
        found = encode(words[: 16 * n_tokens])[:n_tokens]
    if len(found) < n_tokens:
        raise ValueError(f"--tokens: expected at most {len(found)}, the length of {title}, got {n_tokens}")
    if model.main_input_name != "input_ids":
        title = "random sound" + f", and {title}" * model.config.is_encoder_decoder
    return Loaded(name, model, torch.tensor([found], dtype=torch.int64, device="cpu"), title)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ValueError if it is missing or not UTF-8."""
    if not path.is_file():
        raise ValueError(f"--text: expected a text file, got {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: expected UTF-8 in {str(path)!r}, got {error}") from None


def python_manual() -> str:
    """Return Python's manual, as it is installed for ``help()``."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
