"""Parser of pattern texts. The inverse is ``repr``."""

import ast
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from keyword import iskeyword
from typing import NamedTuple

from ringtile.patterns.base import Dense, Pattern
from ringtile.patterns.blocks import SampledBlocks
from ringtile.patterns.documents import Documents
from ringtile.patterns.local import Causal, GlobalTokens, Segments, Strided, Window
from ringtile.patterns.neighborhood import Neighborhood
from ringtile.patterns.offsets import BlockDilated, Dilated
from ringtile.patterns.presets import bigbird, hierarchical, longformer, longnet_union, streaming
from ringtile.patterns.random import RandomBlocks
from ringtile.patterns.traced import constant
from ringtile.patterns.wrapped import PerDocument, PerHead


def as_rule(pattern: object, wanted: str = "a Pattern or its text") -> Pattern:
    """Return a pattern, or the one that a text means. Raise ValueError for anything else."""
    if isinstance(pattern, Pattern):
        return pattern
    if not isinstance(pattern, str):
        got = type(pattern).__name__
        if isinstance(pattern, type) and issubclass(pattern, Pattern):
            got = f"the class {pattern.__name__}: write {pattern.__name__}()"
        raise ValueError(f"pattern: expected {wanted}, got {got}")
    try:
        return parse(pattern)
    except ValueError as error:
        raise ValueError(f"pattern: {error}") from None


def per_head(patterns: Sequence[Pattern | str]) -> Pattern:
    """Give each head its own pattern, as a pattern or its text.

    >>> per_head(["dense", ~Dense()])
    per_head([dense, ~dense])
    """
    return PerHead(tuple(map(as_rule, patterns)))


def per_document(pattern: Pattern | str, documents: Documents | Sequence[int]) -> Pattern:
    """Let a pattern begin anew in each document, as if each were alone. `Documents`, or the tokens per document.

    >>> print(per_document("global_tokens(1)", [2, 3]).draw(5))
    ██···
    █····
    ··███
    ··█··
    ··█··
    """
    return PerDocument(as_rule(pattern), documents if isinstance(documents, Documents) else Documents(documents))


class _Word(NamedTuple):
    build: Callable[..., Pattern]
    parameters: tuple[str, ...] = ()
    required: int = 0
    is_preset: bool = False


_DENSITIES = ("local_density", "node_density", "inter_node_density")
_WORDS = {
    "dense": _Word(Dense),
    "causal": _Word(Causal),
    "window": _Word(Window, ("left", "right"), 1),
    "dilated": _Word(Dilated, ("rates", "window"), 2),
    "block_dilated": _Word(BlockDilated, ("rates", "reach", "block"), 2),
    "strided": _Word(Strided, ("stride",), 1),
    "global_tokens": _Word(GlobalTokens, ("tokens",), 1),
    "random_blocks": _Word(RandomBlocks, ("per_row", "seed", "block"), 1),
    "sampled_blocks": _Word(SampledBlocks, ("keep", "of", "segment", "within", "block"), 3),
    "segments": _Word(Segments, ("length", "dilation", "shift"), 1),
    "documents": _Word(Documents, ("lengths",), 1),
    "neighborhood": _Word(Neighborhood, ("size", "window", "dilation", "stride", "causal", "tile"), 2),
    "per_head": _Word(per_head, ("patterns",), 1),
    "per_document": _Word(per_document, ("pattern", "documents"), 2),
    "longformer": _Word(longformer, ("window", "global_tokens"), is_preset=True),
    "bigbird": _Word(bigbird, ("random", "window", "global_tokens", "block"), is_preset=True),
    "longnet_union": _Word(longnet_union, ("segment_lengths", "dilation_rates"), is_preset=True),
    "streaming": _Word(streaming, ("sinks", "window"), is_preset=True),
    "hierarchical": _Word(hierarchical, ("local", "node", *_DENSITIES, "block"), is_preset=True),
}
_SHOWN = 80
"""Characters of a long text to show on each side of a mistake."""
_LISTS = {"rates", "lengths", "documents", "segment_lengths", "dilation_rates", "size", "tile"}
_EITHER = {"window", "dilation", "stride", "causal", "tokens"}
"""Lists, or numbers."""


class _Mistake(Exception):
    """A mistake and its position in the text."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


@constant
def parse(text: str) -> Pattern:
    """Parse a pattern from text. This is the inverse of ``repr``.

    The words are those of ``repr``, with ``&``, ``|``, ``~`` and brackets. 16K is 16,384, and 1M is 2^20. A preset can
    stand alone (``longformer``), be called (``bigbird(random=2)``) or have its first argument after a colon
    (``bigbird:2``). Raises ValueError that shows the text and points at the mistake.

    >>> parse("causal & (window(1024) | global_tokens(64))")
    causal & (window(1024) | global_tokens(64))
    >>> parse("streaming:8")
    causal & (window(1024) | global_tokens(8))
    >>> parse("causal & windw(1024)")
    Traceback (most recent call last):
    ...
    ValueError: unknown pattern 'windw', did you mean 'window'?
      causal & windw(1024)
               ^
    """
    if not isinstance(text, str):
        raise ValueError(f"parse expects a text, got {text=}")
    return _parse(text)


# Cache of parsed texts. Key: the text. Bound: 256. Owner: the process. Patterns do not change, and a compiled call
# parses the text of its pattern in every step.
@lru_cache(maxsize=256)
def _parse(text: str) -> Pattern:
    line = re.sub(r"\s", " ", text)
    try:
        return _build(_tree(line))
    except _Mistake as mistake:
        first = max(0, mistake.at - _SHOWN)
        shown = line[first : mistake.at + _SHOWN].rstrip()
        message = f"{mistake}\n  {shown}\n  {' ' * (mistake.at - first)}^"
    except (RecursionError, MemoryError):
        message = f"the pattern is nested too deeply: {line[:_SHOWN]}..."
    raise ValueError(message)


def _tree(line: str) -> ast.expr:
    """Return the syntax tree, with the columns of ``line``."""
    if not line.strip():
        raise _Mistake("expected a pattern, got an empty text", 0)
    foreign = re.search(r"[^\w ,=()\[\]&|~:.-]|[^\x00-\x7f]|-(?! *\d)|\b[KM](?=\d)", line)
    if foreign:
        raise _Mistake(f"unexpected character {foreign[0]!r}", foreign.start())
    # Python reads 16K as no number, but K16 as a name of the same length.
    called, closed = _call_short_forms(re.sub(r"(?<![\w.])(\d{1,12})([KM])\b", r"\2\1", line))
    lead = len(called) - len(called.lstrip())
    try:
        tree = ast.parse(called.strip(), mode="eval").body
    except SyntaxError as error:
        # If the text ends too early, the parser reports no column.
        column = lead + error.offset - 1 if error.offset else len(called.rstrip())
        at = min(column - sum(c < column for c in closed), len(line))
        for word in re.finditer(r"\w+", line):
            # Words of Python, such as "global", are no names.
            if iskeyword(word[0]):
                raise _unknown(word[0], word.start()) from None
        expected = "expected patterns combined with &, | and ~"
        raise _Mistake(expected if error.msg == "invalid syntax" else f"cannot read this: {error.msg}", at) from None
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.keyword)):
            column = lead + node.col_offset
            node.col_offset = column - sum(c < column for c in closed)
    return tree


def _call_short_forms(line: str) -> tuple[str, list[int]]:
    """Rewrite each ``preset:3`` as ``preset(3)``, and return the columns of the inserted brackets."""
    closed: list[int] = []
    parts: list[str] = []
    done = 0
    for colon in re.finditer(":", line):
        name = re.search(r"([A-Za-z_]\w*) *$", line[done : colon.start()])
        if not name or not (name[1] in _WORDS and _WORDS[name[1]].is_preset):
            presets = ", ".join(word for word in _WORDS if _WORDS[word].is_preset)
            raise _Mistake(f"only a preset ({presets}) takes its argument after a colon", colon.start())
        number = re.compile(r" *[KM]?[0-9][0-9_]*").match(line, colon.end())
        if not number:
            raise _Mistake("expected a whole number after the colon", colon.start())
        parts += [line[done : colon.start()], "(", number[0], ")"]
        done = number.end()
        closed.append(done + len(closed))
    return "".join([*parts, line[done:]]), closed


def _build(node: ast.expr) -> Pattern:
    match node:
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr() as sign):
            first, second = _build(node.left), _build(node.right)
            try:
                return first & second if isinstance(sign, ast.BitAnd) else first | second
            except ValueError as error:
                raise _Mistake(str(error), node.right.col_offset) from None
        case ast.UnaryOp(op=ast.Invert()):
            return ~_build(node.operand)
        case ast.Name():
            word = _word(node)
            if word.required:
                raise _Mistake(f"{_usage(node.id)} needs its arguments", node.col_offset)
            return word.build()
        case ast.Call(func=ast.Name() as name):
            return _call(node, name.id, _word(name))
    raise _Mistake("expected patterns combined with &, | and ~", node.col_offset)


def _word(node: ast.Name) -> _Word:
    if node.id not in _WORDS:
        raise _unknown(node.id, node.col_offset)
    return _WORDS[node.id]


def _unknown(name: str, at: int) -> _Mistake:
    return _Mistake(f"unknown pattern {name!r}{_suggestion(name, list(_WORDS))}", at)


def _suggestion(name: str, known: list[str]) -> str:
    close = get_close_matches(name.lower(), known, n=1)
    return f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _usage(name: str) -> str:
    word = _WORDS[name]
    parameters = [p if i < word.required else f"[{p}]" for i, p in enumerate(word.parameters)]
    return f"{name}({', '.join(parameters)})"


def _call(node: ast.Call, name: str, word: _Word) -> Pattern:
    arguments: dict[str, ast.expr] = {}
    for position, argument in enumerate(node.args):
        if position >= len(word.parameters):
            raise _Mistake(f"{_usage(name)} takes {len(word.parameters)} arguments", argument.col_offset)
        arguments[word.parameters[position]] = argument
    for keyword in node.keywords:
        if keyword.arg not in word.parameters:
            known = _suggestion(str(keyword.arg), list(word.parameters)) if word.parameters else ""
            raise _Mistake(f"{_usage(name)} has no argument {keyword.arg!r}{known}", keyword.col_offset)
        if keyword.arg in arguments:
            raise _Mistake(f"{name} got {keyword.arg!r} twice", keyword.col_offset)
        arguments[keyword.arg] = keyword.value
    for parameter in word.parameters[: word.required]:
        if parameter not in arguments:
            raise _Mistake(f"{_usage(name)} needs {parameter!r}", node.col_offset)
    values = {parameter: _value(parameter, argument) for parameter, argument in arguments.items()}
    try:
        return word.build(**values)
    except ValueError as error:
        message = str(error)
        places = {parameter: message.find(f" {parameter}=") for parameter in arguments}
        named_first = sorted((parameter for parameter in arguments if places[parameter] >= 0), key=places.__getitem__)
        blamed = [*(arguments[parameter] for parameter in named_first), *arguments.values(), node][0]
        raise _Mistake(message, blamed.col_offset) from None


def _value(parameter: str, node: ast.expr) -> int | float | list[int] | Pattern | list[Pattern]:
    if parameter == "pattern":
        return _build(node)
    if parameter in _DENSITIES and isinstance(node, ast.Constant) and isinstance(node.value, float):
        return node.value
    either = parameter in _EITHER and isinstance(node, ast.List)
    if parameter != "patterns" and parameter not in _LISTS and not either:
        return _number(node)
    if not isinstance(node, ast.List):
        raise _Mistake(f"expected a list for {parameter!r}, like [1, 2]", node.col_offset)
    if parameter == "patterns":
        return [_build(element) for element in node.elts]
    return [_number(element) for element in node.elts]


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
        case ast.Name(id=name) if name[0] in "KM" and name[1:].isdigit():
            return int(name[1:]) << (10 if name[0] == "K" else 20)
    raise _Mistake("expected a whole number", node.col_offset)
