"""Kimi Linear and the language model of Kimi K3: Kimi delta attention, with latent rows in every fourth layer.

vLLM 0.24.0, kimi_linear.py: the convolution's state has the model's dtype, the recurrent state is always float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpage.models.config import Config
from kvpage.models.families.dense import SELF_ATTENTION
from kvpage.models.families.latent import latent_width, plain_rows
from kvpage.models.reading import Family, ModelLayer, Reading
from kvpage.models.states import kimi_delta


def read(reading: Reading) -> Iterator[ModelLayer]:
    config = reading.config
    reading.check_query_heads()
    num_layers, linear = reading.num_layers(), config.child("linear_attn_config")
    recurrent = set() if linear is None else _recurrent(linear, num_layers)
    for index in range(num_layers):
        if linear is not None and index in recurrent:
            yield reading.state(index, "self_attn", kimi_delta(reading, linear), (reading.dtype, "float32"))
        else:
            row = latent_width(config)
            yield reading.latent(index, SELF_ATTENTION, head_size=row, kv=plain_rows(reading))


def _recurrent(linear: Config, num_layers: int) -> set[int]:
    """Indices from 0; the config counts layers from 1 and lists both kinds."""
    recurrent, full = (_listed(linear, name, num_layers) for name in ("kda_layers", "full_attn_layers"))
    if recurrent & full or len(recurrent | full) != num_layers:
        raise linear.fault(
            "kda_layers", f"kda_layers and full_attn_layers must name each of the {num_layers} layers once"
        )
    return recurrent


def _listed(linear: Config, name: str, num_layers: int) -> set[int]:
    items = linear.items(name)
    if items is None:
        raise linear.missing(name)
    return {linear.checked_size(name, item, limit=num_layers) - 1 for item in items}


FAMILIES: dict[str, Family] = {"kimi_linear": Family(read=read)}
