"""`model` in a plan request: a model's config in the place of layers written out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvpage.errors import FieldError, SpecInvalid
from kvpage.models.entry import SCHEMA, entry_layers, looks_like_config
from kvpage.models.model import ModelLayers

FIELD = "model"
_AT = f"/{FIELD}"


def with_model_layers(request: object) -> object:
    """`request` with the layers of its `model` in the model's place; as it is where it has none.

    The model also says what the request leaves out: `max_model_len` (where the memory, not the number of blocks, is
    given) and `align_hybrid` for recurrent states beside attention. Raises as `entry_layers` does, with pointers into
    the request.
    """
    return written_out(request)[0]


def written_out(request: object) -> tuple[object, tuple[str, ...]]:
    """The same, and what was assumed of the model, or is worth a word. Raises `SpecInvalid` where the request is a
    model's config itself."""
    if not isinstance(request, Mapping) or FIELD not in request:
        _refuse_config(request)
        return request, ()
    rest = {name: value for name, value in request.items() if name != FIELD}
    if request[FIELD] is None:
        return rest, ()
    check_alone(request)
    model = entry_layers(request[FIELD], at=_AT)
    return rest | said_by(model, rest), (*model.notes, *_beyond(rest, model))


def _beyond(rest: Mapping[str, Any], model: ModelLayers) -> Iterator[str]:
    asked, most = rest.get("max_model_len"), model.max_model_len
    if isinstance(asked, int) and most is not None and asked > most:
        yield f"max_model_len {asked} is more than the {most} tokens that the model is made for"


def _refuse_config(request: object) -> None:
    """Who has a config.json at hand gives it in the place of a request, and no field of the two is the same."""
    if isinstance(request, Mapping) and looks_like_config(request) and not {"layers", "ranks"} & request.keys():
        detail = (
            'this looks like a model\'s config.json, not like a plan request: give it as `model`, {"model": {"config": '
            '{…}}, "strategy": "auto", "memory_bytes": …}, or plan it with `kvpage plan --model FILE --memory 40GiB`'
        )
        raise SpecInvalid(detail, errors=[FieldError("", detail)])


def check_alone(request: Mapping[str, Any]) -> None:
    """Raises `SpecInvalid` where `layers` stand beside a `model`."""
    if request.get("layers") is not None:
        detail = "model and layers are both given; a request has one of the two"
        raise SpecInvalid(f"{_AT}: {detail}", errors=[FieldError(_AT, detail)])


def said_by(model: ModelLayers, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the model gives to a request with the other fields `rest`: the layers, and what `rest` leaves out."""
    said: dict[str, Any] = {}
    if model.is_hybrid:
        said["align_hybrid"] = True
    if model.max_model_len is not None and rest.get("num_blocks") is None:
        said["max_model_len"] = model.max_model_len
    return {name: value for name, value in said.items() if name not in rest} | {"layers": list(model.layers)}


def describe(schema: dict[str, Any]) -> None:
    """Says in the JSON schema of a plan request that it has layers, or a model, or ranks that write theirs out."""
    schema["properties"][FIELD] = SCHEMA
    schema["required"] = [name for name in schema["required"] if name != "layers"]
    shared = {"anyOf": [{"required": ["layers"]}, {"required": [FIELD]}]}
    schema["oneOf"] = [*shared["anyOf"], {"required": ["ranks"], "not": shared}]
