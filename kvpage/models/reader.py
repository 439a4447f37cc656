"""Reading a model's config.json: a file, or the folder that it lies in. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpage.errors import JsonInvalid, NotFound, TooLarge, shorten
from kvpage.models.model import ModelLayers, model_layers
from kvpage.models.options import as_options
from kvpage.strict_json import loads

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 4 << 20  # the largest public ones, with a setting for each module, have a few hundred KiB


def read_model(
    model: str | Path | Mapping[str, Any],
    *,
    draft: str | Path | Mapping[str, Any] | None = None,
    **options: Any,
) -> ModelLayers:
    """The layers of a model, for a plan request: `{"layers": list(read_model("config.json", tp=4).layers), …}`.

    `model` and `draft` (a speculative draft model, planned into the same pool) are paths or the objects themselves;
    `options` those of `ModelOptions` (tp, attention_dp, pp, pp_stage, kv_dtype, ssm_dtype, backend, block_size,
    num_speculative_tokens). Raises `NotFound`, `TooLarge`, `JsonInvalid` for a file; `NotSupported` for a model type
    that is not known; `SpecInvalid` with JSON pointers into the config (for the draft below `/draft`).
    """
    asked = as_options(options)
    target = model_layers(_config(model), asked)
    if draft is None:
        return target
    drafted = model_layers(_config(draft), asked.of_draft(), at="/draft")
    return target.with_draft(drafted) if asked.is_last_stage else target


def _config(model: str | Path | Mapping[str, Any]) -> object:
    return model if isinstance(model, Mapping) else read_config(Path(model))


def read_config(path: Path) -> Any:
    """The config in file `path`, or in the file config.json of folder `path`.

    Published configs hold `Infinity` where Python wrote it; it is read, and refused only where a size is wanted.
    """
    file = path
    try:
        file = path / CONFIG_NAME if path.is_dir() else path
        if not file.is_file():
            hint = "" if file == path else f"; the folder has no {CONFIG_NAME}"
            raise NotFound(
                f"no model config at {shorten(str(file))!r}{hint}. Models are not downloaded: give a local path"
            )
        with file.open("rb") as opened:
            data = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise NotFound(f"cannot read {shorten(str(file))!r}: {error.strerror}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise TooLarge(f"{shorten(str(file))!r} has more than {MAX_CONFIG_BYTES} bytes; a model's config is smaller")
    try:
        return loads(data, constants=True)
    except JsonInvalid as error:
        detail = f"{shorten(str(file))!r}: {error.message}"
        raise JsonInvalid(detail, details=error.details, errors=error.errors) from None
