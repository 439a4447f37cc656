"""Layers that predict further tokens (MTP), which vLLM 0.24.0 loads as a draft of the model itself: method `mtp`.

They are no part of the layers that a config counts. vLLM loads them by the model's own type; of most larger models
around one it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvpage.models.config import MAX_MTP_LAYERS
from kvpage.models.reading import Family, Fields, Mtp, Reading


def with_predictors(reading: Reading, family: Family) -> tuple[Reading, tuple[Fields, ...]]:
    """The reading with room for the tokens drafted at once, and the layers that draft them, marked as `draft`.

    Without the option `mtp` that is the reading itself and nothing. Raises `SpecInvalid` for a model that has none.
    """
    options = reading.options
    if not options.mtp:
        return reading, ()
    if family.mtp is None or (reading.prefix and not family.mtp.inside):
        raise options.fault(
            "mtp", "vLLM 0.24.0 runs no layers that predict further tokens of such a model; leave it out"
        )
    count = _count(reading, family.mtp)
    drafted = options.num_speculative_tokens or count
    if drafted > count and drafted % count:
        detail = f"{drafted} is no multiple of the {count} tokens that the model predicts at once"
        raise options.fault("num_speculative_tokens", detail)
    if not options.num_speculative_tokens:
        reading.config.note(f"num_speculative_tokens: {count}, as many as the model has layers to predict")
    asked = replace(options, num_speculative_tokens=drafted)
    alone = replace(reading, prefix="", options=replace(asked, backend=options.draft_backend))
    layers = tuple(layer.fields | {"draft": True} for layer in family.mtp.read(alone, count))
    return replace(reading, options=asked), layers if options.is_last_stage else ()


def _count(reading: Reading, mtp: Mtp) -> int:
    if mtp.fixed is not None:
        return mtp.fixed
    config = reading.config
    written = config.optional_size(mtp.field, limit=MAX_MTP_LAYERS, least=0)
    if written is None and mtp.field not in config.values:
        written = mtp.left_out
    if not written:
        raise config.fault(mtp.field, "this must be at least 1 with mtp: the model has no layers that predict tokens")
    return written


def after_the_model(reading: Reading, count: int) -> Iterator[int]:
    """Indices that go on where those of the model end."""
    yield from range(reading.num_layers(), reading.num_layers() + count)


def named_mtp(reading: Reading, layers_at: str = "mtp.layers") -> Reading:
    """For models whose predictors are counted from 0, in a place of their own."""
    return replace(reading, layers_at=layers_at)
