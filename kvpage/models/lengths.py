"""The longest request a model is made for, as vLLM 0.24.0 derives it from a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvpage.models.config import MAX_TOKENS, Config, shown

_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_OVERRIDING_FIELD = "model_max_length"
_UNSCALED = ("su", "longrope", "llama3")  # their factor is already in max_position_embeddings


def max_model_len(config: Config, model_type: str) -> int | None:
    """Tokens; the smallest of the fields that say so, times the factor of the position scaling. None: not said."""
    lengths = [config.optional_size(name, limit=MAX_TOKENS) for name in _LENGTH_FIELDS]
    said = [length for length in lengths if length is not None]
    if config.has(_OVERRIDING_FIELD):
        said = [config.size(_OVERRIDING_FIELD, limit=MAX_TOKENS)]
    if not said:
        return None
    length, factor = min(said), 1.0
    if "gemma3" in model_type:  # published lengths are scaled already
        return length
    for scaling in _scalings(config):
        kind = scaling.text("rope_type") or scaling.text("type") or "default"
        if kind == "longrope":
            return config.optional_size("original_max_position_embeddings", limit=MAX_TOKENS) or length
        if kind in _UNSCALED:
            continue
        factor = _factor(scaling) or factor
        if kind == "yarn":
            length = scaling.optional_size("original_max_position_embeddings", limit=MAX_TOKENS) or length
    if length * factor > MAX_TOKENS:
        raise config.fault("max_position_embeddings", f"scaled by {factor:g} this passes {MAX_TOKENS} tokens")
    return max(1, int(length * factor))


def _scalings(config: Config) -> Iterator[Config]:
    """`rope_parameters` or `rope_scaling`: one object, or one for each type of layer."""
    rope = config.child("rope_parameters") or config.child("rope_scaling")
    if rope is None:
        return
    inner = [name for name, value in rope.values.items() if isinstance(value, Mapping)]
    yield from [rope.required_child(name) for name in inner] or [rope]


def _factor(scaling: Config) -> float | None:
    value = scaling.values.get("factor")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TOKENS:
        raise scaling.fault("factor", f"this must be a number above 0, not {shown(value)}")
    return float(value)
