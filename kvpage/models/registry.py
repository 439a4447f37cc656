"""All model types that are read, and the larger models whose config holds that of a language model."""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.models.families import (
    chatglm,
    deepseek_v4,
    dense,
    gemma,
    hunyuan,
    hybrids,
    jamba,
    kimi_linear,
    latent,
    llama4,
    mimo,
    minimax,
    nemotron,
    qwen_gdn,
    step,
)
from kvpage.models.reading import Family

_MODULES = (
    dense,
    chatglm,
    gemma,
    hunyuan,
    llama4,
    mimo,
    step,
    qwen_gdn,
    latent,
    deepseek_v4,
    kimi_linear,
    nemotron,
    hybrids,
    jamba,
    minimax,
)
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A model that is more than its language model: only that keeps a KV cache."""

    path: tuple[str, ...] = ("text_config",)
    """Where the language model's config lies; a config without it is the language model's itself."""
    text_type: str | None = None
    """Its model type where the inner config names none: what the published config class puts there."""
    prefix: str = "language_model."
    """Of layer names in vLLM 0.24.0."""


_THINKER = ("thinker_config", "text_config")

WRAPPERS: dict[str, Wrapper] = {
    "llava": Wrapper(text_type="llama"),
    "llava_next": Wrapper(text_type="llama"),
    "llava_onevision": Wrapper(text_type="qwen2"),
    "pixtral": Wrapper(text_type="mistral"),
    "mistral3": Wrapper(text_type="mistral"),
    "voxtral": Wrapper(text_type="llama"),
    "qwen2_vl": Wrapper(text_type="qwen2_vl_text"),
    "qwen2_5_vl": Wrapper(text_type="qwen2_5_vl_text"),
    "qwen2_audio": Wrapper(text_type="qwen2"),
    "qwen2_5_omni": Wrapper(path=_THINKER, text_type="qwen2_5_omni_text"),
    "qwen2_5_omni_thinker": Wrapper(text_type="qwen2_5_omni_text"),
    "qwen3_vl": Wrapper(text_type="qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper(text_type="qwen3_vl_moe_text"),
    "qwen3_omni_moe": Wrapper(path=_THINKER, text_type="qwen3_omni_moe_text"),
    "qwen3_omni_moe_thinker": Wrapper(text_type="qwen3_omni_moe_text"),
    "qwen3_5": Wrapper(text_type="qwen3_5_text"),
    "qwen3_5_moe": Wrapper(text_type="qwen3_5_moe_text"),
    "paligemma": Wrapper(text_type="gemma"),
    "gemma3": Wrapper(text_type="gemma3_text"),
    "gemma3n": Wrapper(text_type="gemma3n_text"),
    "gemma4": Wrapper(text_type="gemma4_text"),
    "gemma4_unified": Wrapper(text_type="gemma4_unified_text"),
    "llama4": Wrapper(text_type="llama4_text"),
    "glm4v": Wrapper(text_type="glm4v_text"),
    "glm46v": Wrapper(text_type="glm4v_text"),
    "glm4v_moe": Wrapper(text_type="glm4v_moe_text"),
    "kimi_vl": Wrapper(text_type="deepseek_v2"),
    "kimi_k25": Wrapper(text_type="deepseek_v3"),
    "kimi_k3": Wrapper(text_type="kimi_linear"),
    "step3_vl": Wrapper(text_type="step3_text"),
    "step3p7": Wrapper(text_type="step3p5"),
    "mimo_v2_omni": Wrapper(text_type="mimo_v2"),
    "minimax_vl_01": Wrapper(text_type="minimax_text_01"),
    "minimax_m3_vl": Wrapper(text_type="minimax_m3_vl_text"),
    "internvl": Wrapper(),
    "internvl_chat": Wrapper(path=("llm_config",)),
    "interns1": Wrapper(),
    "NVLM_D": Wrapper(path=("llm_config",)),
    "nemotron_h_omni": Wrapper(text_type="nemotron_h"),
    "NemotronH_Nano_VL_V2": Wrapper(path=("llm_config",), text_type="nemotron_h"),
    "ovis": Wrapper(path=("llm_config",), prefix="llm."),
    "ovis2_5": Wrapper(path=("llm_config",), prefix="llm."),
    "deepseek_vl_v2": Wrapper(path=("language_config",), text_type="deepseek_v2", prefix="language."),
    "lfm2_vl": Wrapper(text_type="lfm2", prefix="language."),
    "lfm2-vl": Wrapper(text_type="lfm2", prefix="language."),  # as first published
    "cohere2_vision": Wrapper(text_type="cohere2"),
    "aya_vision": Wrapper(text_type="cohere2"),
}
