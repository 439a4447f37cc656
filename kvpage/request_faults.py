"""Faults of layers that the caller did not write: told once, at what was asked of the model they were read from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpage.errors import FieldError, SpecInvalid
from kvpage.layers import check_layouts
from kvpage.models.options import OPTION_NAMES
from kvpage.request import PlanRequest
from kvpage.request_model import FIELD

_AT = f"/{FIELD}"
_FIRST = ("backend", "draft_backend", "kv_dtype", "block_size")  # what layers are refused for, mostly
_TRIED = (*_FIRST, *(name for name in OPTION_NAMES if name not in _FIRST), "draft")
_OF_LAYER = re.compile(r"/layers/\d+[\w/]*: ")
_MORE = re.compile(r" \(and \d+ more\)$")


@contextmanager
def faults_at_model(request: object) -> Iterator[None]:
    """Faults of the layers of a `model` point at the field of it that they come from, or at the model. Layers of one
    model are alike: what is wrong with all of them is one fault."""
    try:
        yield
    except SpecInvalid as error:
        if not isinstance(request, Mapping) or request.get(FIELD) is None or not any(map(_is_of_layer, error.errors)):
            raise
        cause = _cause(request)
        faults = list(dict.fromkeys(_moved(fault, cause) for fault in error.errors))
        detail = _OF_LAYER.sub("", _MORE.sub("", error.message.removeprefix(f"{error.errors[0].pointer}: ")))
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise type(error)(f"{faults[0].pointer}: {detail}{more}", details=error.details, errors=faults) from None


def _is_of_layer(fault: FieldError) -> bool:
    return fault.pointer.startswith("/layers")


def _moved(fault: FieldError, cause: str) -> FieldError:
    return FieldError(cause, _OF_LAYER.sub("", fault.detail)) if _is_of_layer(fault) else fault


def _cause(request: Mapping[str, Any]) -> str:
    """Pointer to the one field of the model without which its layers could be read; to the model where there is none,
    or where each layer is sound and only together they are not."""
    model = request[FIELD]
    if not isinstance(model, Mapping) or _is_sound(model, request):
        return _AT
    for name in _TRIED:
        if model.get(name) is not None:
            without = {key: value for key, value in model.items() if key != name}
            if _is_sound(without, request):
                return f"{_AT}/{name}"
    return _AT


def _is_sound(model: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether each layer of `model` can be read and laid out by itself."""
    asked = {"strategy": "unify", "num_blocks": 1, "kv_cache_layout": request.get("kv_cache_layout")}
    try:
        check_layouts(PlanRequest.parse({**asked, FIELD: model}).expand())
    except SpecInvalid:
        return False
    return True
