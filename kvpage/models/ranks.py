"""All ranks of a model: what each pipeline stage keeps, and how often the same bytes are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from kvpage.models.config import Config
from kvpage.models.entry import entry_layers
from kvpage.models.model import ModelLayers
from kvpage.models.options import MAX_RANKS, ModelOptions, as_options
from kvpage.models.reading import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """Rank r is tensor-parallel rank r % tp of stage r // tp, as in vLLM 0.24.0."""

    stages: tuple[ModelLayers, ...]
    """The layers of a rank of each stage."""
    tp: int
    kv_replicas: int
    """Ranks that keep the same bytes in every layer."""

    @property
    def model(self) -> ModelLayers:
        """All stages as one."""
        layers = tuple(layer for stage in self.stages for layer in stage.layers)
        notes = tuple(dict.fromkeys(note for stage in self.stages for note in stage.notes))
        return ModelLayers(layers=layers, max_model_len=self.stages[0].max_model_len, notes=notes)

    def kept(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of each rank."""
        stages = [tuple(layer["name"] for layer in stage.layers) for stage in self.stages]
        return tuple(names for names in stages for _ in range(self.tp))


def entry_ranks(entry: object, *, at: str = "") -> ModelRanks:
    """Every rank of the model that `entry` names, found at JSON pointer `at`.

    Raises as `entry_layers` does, and `SpecInvalid` for more than `MAX_RANKS` ranks or a `pp_stage`, which is of one.
    """
    if not isinstance(entry, Mapping):
        raise Config(values={}, at=at).fault("", "this must be an object with the config of a model")
    options = as_options({key: value for key, value in entry.items() if key not in ("config", "draft")}, at=at)
    if entry.get("pp_stage") is not None:
        raise options.fault("pp_stage", "all stages are planned; leave it out, or leave ranks out")
    if options.tp * options.pp > MAX_RANKS:
        raise options.fault("tp", f"tp {options.tp} × pp {options.pp} is more than {MAX_RANKS} ranks")
    stages = tuple(entry_layers({**entry, "pp_stage": stage}, at=at) for stage in range(options.pp))
    whole = {"tp": 1, "attention_dp": 1}
    undivided = (entry_layers({**entry, **whole, "pp_stage": stage}, at=at).layers for stage in range(options.pp))
    all_layers = [layer for layers in undivided for layer in layers]
    return ModelRanks(stages=stages, tp=options.tp, kv_replicas=_replicas(all_layers, options))


def _replicas(undivided: Sequence[Fields], options: ModelOptions) -> int:
    """The greatest common divisor over layers: so many ranks hold the same bytes whatever the layer."""
    return gcd(*(max(1, options.attention_tp // shards) for shards in _shards(undivided, options))) or 1


def _shards(undivided: Sequence[Fields], options: ModelOptions) -> Iterator[int]:
    """Parts that each layer's cache is divided into: its heads; latent rows are one; states go to every rank."""
    for layer in undivided:
        if "shapes" in layer:
            yield options.attention_tp
        else:
            yield _heads(layer)


def _heads(layer: Mapping[str, Any]) -> int:
    return int(layer.get("num_kv_heads", 1))
