"""Ragged batches without padding: the base of a model computes the real tokens of all rows as documents of one row.

The base packs its inputs and puts its outputs into rows again, so heads and poolers see padded rows. Attention learns
of the documents by a keyword argument, which transformers hands to every attention call.
"""

import inspect
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.integrations.transformers.attention import KEPT, ROWS
from ringtile.integrations.transformers.door import cache_of
from ringtile.integrations.transformers.masks import CHOSEN
from ringtile.patterns import Dense, Documents
from ringtile.patterns.traced import outside_graphs

_ROBERTA = {"camembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
"""Models that count the positions of tokens other than padding, from one after the number of the padding token."""
_PACKED = _ROBERTA | set(
    "bert distilbert electra ernie eurobert gemma gemma2 gemma3_text granite jina_embeddings_v3 llama mistral "
    "modernbert nomic_bert phi3 qwen2 qwen3".split()
)
"""Models in which tokens meet in attention only. Others may count or mix the tokens of a row elsewhere."""
_DIMS = {"input_ids": 2, "attention_mask": 2, "position_ids": 2, "token_type_ids": 2, "inputs_embeds": 3}


def pack_rows(model: Any) -> None:
    """Pack the batches of a model's base from now on. Raise ValueError if its rows cannot be packed."""
    base = model.base_model
    if (kind := base.config.model_type) not in _PACKED:
        raise ValueError(f"pack: expected a model among {', '.join(sorted(_PACKED))}, got {kind}")
    if not isinstance(base.forward, _Packed):
        if "forward" in vars(base):
            raise ValueError(f"pack: expected a model with its own forward, got {base.forward!r} from elsewhere")
        # Not by hooks: sentence-transformers calls forward itself.
        base.forward = _Packed(base)


class _Packed:
    """The forward of a base of a model that packs its batches, as long as the choice of `use_ringtile` says so."""

    def __init__(self, base: Any) -> None:
        self.base = base

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.base).forward, self.base))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, chosen = type(self.base).forward, getattr(self.base, KEPT, None)
        if chosen is None or not chosen.pack or self.base.config._attn_implementation != CHOSEN:
            return forward(self.base, *args, **kwargs)
        given = {**dict(zip(self.__signature__.parameters, args, strict=False)), **kwargs}
        given, real = _pack(self.base, {name: x for name, x in given.items() if x is not None})
        output = forward(self.base, **given)
        if real is not None:
            _unpack(self.base, real, output)
        return output


@outside_graphs
def _pack(base: Any, given: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Return arguments with the real tokens of all rows in one, and which tokens are real: None without padding."""
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    if name not in given:
        raise ValueError("input_ids: expected tokens [B, N], or inputs_embeds, got None")
    batch, n_tokens = given[name].shape[:2]
    _check(given, batch, n_tokens)
    mask = given.get("attention_mask", given[name].new_ones((batch, n_tokens), dtype=torch.bool))
    real = mask.bool().expand(batch, -1)
    if "use_cache" in inspect.signature(base.forward).parameters:
        given["use_cache"] = False
    if bool(real.all()):
        return {**given, ROWS: Dense()}, None
    runs = (F.pad(real, (1, 0))[:, :-1] < real).sum(1)
    if bool((runs != 1).any()):
        raise ValueError(f"attention_mask: expected one run of tokens in each row to pack it, got {runs.tolist()} runs")
    if getattr(base, "pooler", None) is not None and not bool(real[:, 0].all()):
        raise ValueError("attention_mask: expected padding on the right to pack rows, whose first tokens are pooled")
    if "position_ids" not in given:
        # As the model counts them in padded rows.
        given["position_ids"] = torch.arange(n_tokens, device=real.device).unsqueeze(0)
        if base.config.model_type in _ROBERTA:
            count = getattr(base.embeddings, f"create_position_ids_from_{name}")
            given["position_ids"] = count(given[name], base.embeddings.padding_idx)
    # A mask tells transformers that it need not look for documents itself.
    given["attention_mask"] = real
    for name in _DIMS.keys() & given.keys():
        given[name] = given[name].expand(batch, *given[name].shape[1:])[real].unsqueeze(0)
    return {**given, ROWS: Documents(cu_seqlens=F.pad(real.sum(1).cumsum(0), (1, 0)))}, real


def _check(given: dict[str, Any], batch: int, n_tokens: int) -> None:
    """Raise ValueError if an argument is not one value per token, or asks for a cache."""
    if cache_of(given) is not None or given.get("use_cache"):
        raise ValueError("use_cache: expected False for packed rows, which have no cache; leave pack= out to generate")
    for name, x in given.items():
        shape: tuple[int, ...] = tuple(getattr(x, "shape", ()))
        fits = len(shape) == _DIMS.get(name, 0) and shape[:2] in ((), (1, n_tokens), (batch, n_tokens))
        if not fits:
            what = f"{(batch, n_tokens)} of the tokens" if name in _DIMS else f"None, beside {', '.join(_DIMS)}"
            raise ValueError(f"{name}: expected {what} to pack rows, got {type(x).__name__} {shape}")


@outside_graphs
def _unpack(base: Any, real: Tensor, output: Any) -> None:
    """Put the outputs of a packed row into padded rows, in place."""

    def in_rows(x: Tensor) -> Tensor:
        return x.new_zeros(*real.shape, x.shape[2]).index_put((real,), x[0])

    if isinstance(output, tuple):
        raise ValueError("return_dict: expected True to pack rows, got False")
    for name, x in list(output.items()):
        if name == "hidden_states":
            output[name] = tuple(map(in_rows, x))
        elif name == "last_hidden_state":
            output[name] = in_rows(x)
        elif name == "pooler_output":
            output[name] = base.pooler(output["last_hidden_state"])
        else:
            raise ValueError(f"{name}: expected no such output to pack rows, got {type(x).__name__}")
