"""From a model's config to the layers of a plan request. Pure: nothing is read from disk, nothing is executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvpage.errors import FieldError, NotSupported, shorten
from kvpage.models.config import Config, shown
from kvpage.models.formats import kv_format, model_dtype
from kvpage.models.lengths import max_model_len
from kvpage.models.mtp import with_predictors
from kvpage.models.options import WINDOWS, ModelOptions
from kvpage.models.per_layer import check_per_layer
from kvpage.models.reading import Family, Fields, ModelLayer, Reading
from kvpage.models.registry import FAMILIES, WRAPPERS, Wrapper

DRAFT_PREFIX = "draft."
_INNER = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """What a plan request needs of a model."""

    layers: tuple[Fields, ...]
    """Entries of the request's `layers`, in the model's order."""
    max_model_len: int | None
    """The longest request the model is made for, in tokens; None where the config does not say."""
    notes: tuple[str, ...]
    """What was assumed because the config leaves it out."""

    @property
    def is_hybrid(self) -> bool:
        """Recurrent states beside attention: such a model is planned with `align_hybrid`."""
        kinds = {layer["kind"] for layer in self.layers}
        return "mamba" in kinds and len(kinds) > 1

    def with_draft(self, draft: ModelLayers) -> ModelLayers:
        """The layers of both; those of the draft are marked, and named `draft.…`."""
        marked = tuple(_as_draft(layer) for layer in draft.layers)
        notes = tuple(f"draft: {note}" for note in draft.notes)
        return replace(self, layers=self.layers + marked, notes=self.notes + notes)


def _as_draft(layer: Fields) -> Fields:
    named = {key: DRAFT_PREFIX + layer[key] for key in ("name", "kv_sharing_target") if key in layer}
    return layer | named | {"draft": True}


def model_layers(config: object, options: ModelOptions, *, at: str = "") -> ModelLayers:
    """The caches of one rank of the model that `config` (the object of a config.json) describes.

    `at`: JSON pointer of the config in what the caller sent. Raises `NotSupported` for a model type that is not
    known and `SpecInvalid` for a config that lacks or contradicts what the caches depend on; `errors` points at it.
    """
    if not isinstance(config, Mapping):
        raise Config(values={}, at=at).fault("", f"this must be an object, the config of a model, not {shown(config)}")
    root = Config(values=config, at=at)
    parts, model_type, prefix = _language_model(root)
    text = parts[-1]
    family = _family(text, model_type)
    dtype = model_dtype(parts)
    text = text.with_defaults(family.defaults, family.defaults_of)
    reading = Reading(
        config=text,
        options=options,
        dtype=dtype,
        kv=kv_format(options, parts, dtype),
        prefix=prefix,
    )
    check_per_layer(reading, family, model_type)
    reading, predictors = with_predictors(reading, family)
    read = tuple(family.read(reading))
    _note_skipped(reading, read)
    layers = _of_stage(reading, read) + predictors
    longest = max_model_len(text, model_type)
    return ModelLayers(layers=layers, max_model_len=longest, notes=tuple(root.notes))


def _note_skipped(reading: Reading, layers: Iterable[ModelLayer]) -> None:
    """vLLM skips nothing for a number of no layer; that is worth a word."""
    indices = {str(layer.index) for layer in layers}
    for name in reading.options.kv_dtype_skip_layers:
        if name != WINDOWS and name not in indices:
            reading.config.note(f"kv_dtype_skip_layers: the model keeps nothing in a layer {name}")


def _language_model(root: Config) -> tuple[tuple[Config, ...], str, str]:
    """The config and its parts down to the one that keeps a cache, that one's model type, and its names' prefix."""
    model_type = root.text("model_type")
    if model_type is None:
        raise root.missing("model_type")
    if model_type not in WRAPPERS:
        return (root,), model_type, ""
    wrapper = WRAPPERS[model_type]
    parts = _parts(root, wrapper)
    written = None if len(parts) == 1 else parts[-1].text("model_type")
    text_type = written or wrapper.text_type
    if text_type is None:
        raise parts[-1].missing("model_type")
    return parts, text_type, wrapper.prefix


def _parts(root: Config, wrapper: Wrapper) -> tuple[Config, ...]:
    """Older configs of some models hold the language model's fields themselves."""
    parts = [root]
    if wrapper.path[0] in root.values or not root.has("num_hidden_layers"):
        for name in wrapper.path:
            parts.append(parts[-1].required_child(name))
    return tuple(parts)


def _family(config: Config, model_type: str) -> Family:
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    inner = [name for name in _INNER if isinstance(config.values.get(name), Mapping)]
    hint = f"; give the object at /{inner[0]} alone if its model type is known" if inner else ""
    detail = (
        f"model type {shorten(model_type)!r} is not known, so what its layers keep is not known either; "
        f"write the layers out in the request (docs/layout.md){hint}. docs/models.md lists the model types"
    )
    where = f"{config.at}/model_type"
    raise NotSupported(f"{where}: {detail}", errors=[FieldError(where, detail)])


def _of_stage(reading: Reading, layers: tuple[ModelLayer, ...]) -> tuple[Fields, ...]:
    """The layers of the asked pipeline stage. Raises `SpecInvalid` when that leaves a shared cache behind."""
    options = reading.options
    if options.pp == 1:
        return tuple(layer.fields for layer in layers)
    num_layers = reading.num_layers()
    if options.pp > num_layers:
        raise options.fault("pp", f"{num_layers} layers cannot fill {options.pp} stages; use a smaller pp")
    first, end = _stage(num_layers, options.pp, options.pp_stage)
    mine = tuple(layer.fields for layer in layers if first <= layer.index < end)
    names = {layer["name"] for layer in mine}
    for layer in mine:
        if layer.get("kv_sharing_target", layer["name"]) not in names:
            detail = f"layer {layer['name']!r} reads the cache of a layer in another pipeline stage; use a smaller pp"
            raise options.fault("pp", detail)
    return mine


def _stage(num_layers: int, pp: int, stage: int) -> tuple[int, int]:
    """First layer of the stage, and the first of the next. As in vLLM 0.24.0 the stages before the last take what is
    left over, from the back."""
    each, left = divmod(num_layers, pp)
    sizes = [each + (pp - 1 - left <= index < pp - 1) for index in range(pp)]
    return sum(sizes[:stage]), sum(sizes[: stage + 1])
