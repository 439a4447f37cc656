"""Models whose layers all keep keys and values of one width, some of them for a window only.

A model of this sort is one line here: its config class, that class's defaults for what configs leave out, the rule for
its windows, and where vLLM 0.24.0 puts the attention in a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvpage.models.mtp import after_the_model
from kvpage.models.patterns import LayerType, Rule, all_alike, every, layer_types, when_used, window
from kvpage.models.per_layer import of_layer
from kvpage.models.reading import Family, ModelLayer, Mtp, Reading, head_width, refuse

RELEASE = "transformers 5.24.0"
SELF_ATTENTION = "self_attn.attn"
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


def read(reading: Reading, *, rule: Rule = all_alike, module: str = SELF_ATTENTION) -> Iterator[ModelLayer]:
    config = reading.config
    if config.flag("use_bidirectional_attention") and not reading.prefix:  # inside a larger model: over images only
        raise refuse(config, "use_bidirectional_attention", "such a model reads a prompt at once and keeps no cache")
    for index, kind in enumerate(layer_types(config, reading.num_layers(), rule)):
        own = of_layer(reading, index)
        kv_heads, width = heads_and_width(own)
        yield own.attention(index, module, num_kv_heads=kv_heads, head_size=width, window=window_of(own, kind))


def read_mtp(reading: Reading, count: int) -> Iterator[ModelLayer]:
    kv_heads, width = heads_and_width(reading)
    for index in after_the_model(reading, count):
        yield reading.attention(index, SELF_ATTENTION, num_kv_heads=kv_heads, head_size=width)


def heads_and_width(reading: Reading) -> tuple[int, int]:
    """KV heads of one rank, as many as there are query heads where the config does not say, and their width."""
    config, heads = reading.config, reading.check_query_heads()
    kv_heads = config.optional_size("num_key_value_heads") or heads
    return reading.kv_heads(config, "num_key_value_heads", kv_heads), head_width(reading, heads)


def window_of(reading: Reading, kind: LayerType) -> int | None:
    """The window of a layer of type `kind`. Raises `SpecInvalid` where it has none, or is of no type known here."""
    config = reading.config
    if kind == "full":
        return None
    if kind != "sliding":
        raise refuse(config, "layer_types", f"{kind} layers are not known of this model type")
    seen = window(config)
    if seen is None:
        raise config.fault("sliding_window", "this field is required: some layers see a window")
    return seen


def dense(
    published: str,
    *sizes: int | None,
    head_dim: int | None = None,
    window: int | None = None,
    rule: Rule = all_alike,
    module: str = SELF_ATTENTION,
    mtp: Mtp | None = None,
    **more: object,
) -> Family:
    """`sizes`: the class's hidden size, layers, query heads, KV heads (None: as many) and longest request."""
    defaults: dict[str, object] = dict(zip(SIZES, sizes, strict=True))
    defaults |= {"head_dim": head_dim, "sliding_window": window} | more
    known = f"{published}, {RELEASE}"
    return Family(
        read=partial(read, rule=rule, module=module), defaults=defaults, defaults_of=known, mtp=mtp, per_layer=True
    )


def undocumented(*, rule: Rule = all_alike, module: str = SELF_ATTENTION, mtp: Mtp | None = None) -> Family:
    """A model whose config class comes with its weights: nothing may be left out."""
    return Family(read=partial(read, rule=rule, module=module), mtp=mtp, per_layer=True)


_MTP = Mtp(read=read_mtp)


FAMILIES: dict[str, Family] = {
    "llama": dense("LlamaConfig", 4096, 32, 32, None, 2048),
    "arcee": dense("ArceeConfig", 2560, 32, 32, None, 4096),
    "apertus": dense("ApertusConfig", 4096, 32, 32, None, 65536),
    "mistral": dense("MistralConfig", 4096, 32, 32, 8, 131072, window=4096),
    "ministral": dense("MinistralConfig", 4096, 32, 32, 8, 131072, window=4096),
    "ministral3": dense("Ministral3Config", 4096, 34, 32, 8, 262144, head_dim=128),
    "mixtral": dense("MixtralConfig", 4096, 32, 32, 8, 131072),
    "qwen2": dense("Qwen2Config", 4096, 32, 32, 32, 32768, window=4096, rule=when_used, max_window_layers=28),
    "qwen2_vl_text": dense(
        "Qwen2VLTextConfig", 8192, 80, 64, 8, 32768, window=4096, rule=when_used, max_window_layers=80
    ),
    "qwen2_5_vl_text": dense(
        "Qwen2_5_VLTextConfig", 8192, 80, 64, 8, 32768, window=4096, rule=when_used, max_window_layers=80
    ),
    "qwen2_5_omni_text": dense(
        "Qwen2_5OmniTextConfig", 3584, 28, 28, 4, 32768, window=32768, rule=when_used, max_window_layers=28
    ),
    "qwen2_moe": dense("Qwen2MoeConfig", 2048, 24, 16, 16, 32768, window=4096, rule=when_used, max_window_layers=28),
    "qwen3": dense(
        "Qwen3Config", 4096, 32, 32, 32, 32768, head_dim=128, window=4096, rule=when_used, max_window_layers=28
    ),
    "qwen3_moe": dense("Qwen3MoeConfig", 2048, 24, 32, 4, 32768, window=4096, rule=when_used),
    "qwen3_vl_text": dense("Qwen3VLTextConfig", 4096, 32, 32, 32, 128000, head_dim=128),
    "qwen3_vl_moe_text": dense("Qwen3VLMoeTextConfig", 2048, 24, 16, 16, 128000),
    "qwen3_omni_moe_text": dense("Qwen3OmniMoeTextConfig", 2048, 28, 28, 4, 32768, rule=when_used),
    "gemma": dense("GemmaConfig", 3072, 28, 16, 16, 8192, head_dim=256),
    "gemma2": dense("Gemma2Config", 2304, 26, 8, 4, 8192, head_dim=256, window=4096, rule=every(2)),
    "gemma3_text": dense("Gemma3TextConfig", 2304, 26, 8, 4, 131072, head_dim=256, window=4096, rule=every(6)),
    "gpt_oss": dense(
        "GptOssConfig", 2880, 36, 64, 8, 131072, head_dim=64, window=128, rule=every(2), module="attn.attn"
    ),
    "phi": dense("PhiConfig", 2048, 24, 32, None, 2048),
    "phi3": dense("Phi3Config", 3072, 32, 32, None, 4096),
    "phi3_v": undocumented(),
    "phi4mm": undocumented(),
    "phi4_multimodal": dense("Phi4MultimodalConfig", 3072, 32, 32, 8, 131072),
    "phimoe": dense("PhimoeConfig", 4096, 32, 32, 8, 131072),
    "glm": dense("GlmConfig", 4096, 40, 32, 2, 131072, head_dim=128),
    "glm4": dense("Glm4Config", 4096, 40, 32, 2, 131072, head_dim=128),
    "glm4_moe": dense("Glm4MoeConfig", 4096, 46, 96, 8, 131072, mtp=_MTP),
    "glm4v_text": dense("Glm4vTextConfig", 4096, 40, 32, 2, 32768),
    "glm4v_moe_text": dense("Glm4vMoeTextConfig", 4096, 46, 96, 8, 65536),
    "minimax_m2": dense("MiniMaxM2Config", 3072, 62, 48, 8, 196608, head_dim=128),
    "mimo": undocumented(rule=when_used, mtp=_MTP),
    "nemotron": dense("NemotronConfig", 6144, 32, 48, None, 4096),
    "cohere": dense("CohereConfig", 8192, 40, 64, None, 8192),
    "cohere2": dense("Cohere2Config", 8192, 40, 64, None, 8192, window=4096, rule=every(4)),
    "olmo": dense("OlmoConfig", 4096, 32, 32, None, 2048),
    "olmo2": dense("Olmo2Config", 4096, 32, 32, None, 2048),
    "olmo3": dense("Olmo3Config", 4096, 32, 32, None, 2048, window=4096, rule=every(4)),
    "olmoe": dense("OlmoeConfig", 2048, 16, 16, None, 4096),
    "granite": dense("GraniteConfig", 4096, 32, 32, None, 2048),
    "granitemoe": dense("GraniteMoeConfig", 4096, 32, 32, None, 2048),
    "starcoder2": dense("Starcoder2Config", 3072, 30, 24, 2, 4096),
    "stablelm": dense("StableLmConfig", 2560, 32, 32, 32, 4096),
    "seed_oss": dense("SeedOssConfig", 4096, 64, 80, 8, 524288, head_dim=128),
    "ernie4_5": dense("Ernie4_5Config", 1024, 18, 16, 2, 131072, head_dim=128),
    "ernie4_5_moe": dense("Ernie4_5_MoeConfig", 2560, 28, 20, 4, 131072, mtp=_MTP),
    "deepseek": undocumented(),
    "internlm2": undocumented(module="attention.attn"),
    "internlm3": undocumented(),
}
