"""A model as a plan request names it: `{"config": {…}, "tp": 8, "kv_dtype": "fp8", "draft": {…}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpage.models.config import MAX_MODEL_LAYERS, Config
from kvpage.models.model import ModelLayers, model_layers
from kvpage.models.options import MAX_RANKS, MAX_SPECULATIVE_TOKENS, STATE_DTYPES, WINDOWS, as_options

_COUNT = {"type": "integer", "minimum": 1}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "A model in place of `layers`: its config.json, from which the layers of one rank are read.",
    "required": ["config"],
    "additionalProperties": False,
    "properties": {
        "config": {"type": "object", "description": "The object in the model's config.json (docs/models.md)."},
        "draft": {"type": "object", "description": "The config of a speculative draft model, planned beside it."},
        "tp": {**_COUNT, "maximum": MAX_RANKS, "default": 1, "description": "Tensor-parallel ranks."},
        "attention_dp": {
            **_COUNT,
            "maximum": MAX_RANKS,
            "default": 1,
            "description": "Groups of the tensor-parallel ranks that attend to requests of their own.",
        },
        "pp": {**_COUNT, "default": 1, "description": "Pipeline stages."},
        "pp_stage": {"type": "integer", "minimum": 0, "default": 0},
        "kv_dtype": {"type": "string", "default": "auto", "description": "vLLM's --kv-cache-dtype."},
        "ssm_dtype": {"type": "string", "enum": list(STATE_DTYPES), "default": "auto"},
        "backend": {"description": "Backend of the attention layers, as in a layer."},
        "draft_backend": {"description": "Backend of the draft's layers. Left out: by kind of layer."},
        "kv_dtype_skip_layers": {
            "type": "array",
            "maxItems": MAX_MODEL_LAYERS,
            "items": {"type": "string", "pattern": f"^([0-9]+|{WINDOWS})$"},
            "description": "Layers that keep the model's dtype: numbers, or sliding_window.",
        },
        "mtp": {
            "type": "boolean",
            "default": False,
            "description": "Plan the model's own layers for predicting further tokens beside it.",
        },
        "block_size": {**_COUNT, "description": "Tokens of a block."},
        "num_speculative_tokens": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_SPECULATIVE_TOKENS,
            "default": 0,
        },
    },
}
"""JSON schema of such an object."""


def looks_like_config(values: Mapping[Any, object]) -> bool:
    """True for what is a model's config.json and no request or entry of ours."""
    return "model_type" in values or "architectures" in values


def entry_layers(entry: object, *, at: str = "") -> ModelLayers:
    """The layers of the model that `entry` names, found at JSON pointer `at`. Raises as `model_layers` does."""
    fields = Config(values={"entry": entry}, at=at).as_child("", entry)
    if "config" not in fields.values and looks_like_config(fields.values):
        raise fields.fault("", "this looks like a model's config.json itself; it belongs into `config` of this object")
    options = {name: value for name, value in fields.values.items() if name not in ("config", "draft")}
    asked = as_options(options, at=at)
    target = model_layers(fields.required_child("config").values, asked, at=f"{at}/config")
    draft = fields.child("draft")
    if draft is None:
        return target
    drafted = model_layers(draft.values, asked.of_draft(), at=f"{at}/draft")
    return target.with_draft(drafted) if asked.is_last_stage else target
