"""DeepSeek 2 and 3: latent attention, experts in groups, shared experts, and dense layers first; and what follows them.

Notable here:
- rotated dimensions of queries and of the shared key are stored as interleaved pairs
- DeepSeek 3 scores experts by sigmoids, and a bias that balances their load moves the choice, not the weights
- layers after the last predict further tokens; they are not read
- GLM-4.7-Flash (glm4_moe_lite) is DeepSeek 3; dots.llm1 has its experts, with attention as in Qwen 3

Source: DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import expert_rules, shared_expert
from pippin.language.families.family import (
    Family,
    Fields,
    TensorRule,
    activation_of,
    layer_types,
    read_decoder,
    read_rotary,
    refuse,
)
from pippin.language.families.gguf_layout import SIGMOID_ROUTER, GGUFHeader, GGUFLayout
from pippin.language.families.latent import (
    keys_and_values,
    keys_and_values_apart,
    latent_from_gguf,
    latent_gguf_rules,
    latent_to_gguf,
    rotated_rules,
)
from pippin.language.families.sizes import check_size
from pippin.nn.attention.attention import AttentionSpec, LatentSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec


def _v2(config: Fields) -> DecoderConfig:
    refuse("deepseek_v2", config, "norm_topk_prob", "mlp_bias")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {method!r} is not supported, only 'greedy' and 'group_limited_greedy' are")
    router = RouterSpec(scale=config.get("routed_scaling_factor", 1.0))
    if method == "group_limited_greedy":
        router = RouterSpec(num_groups=config["n_group"], num_chosen_groups=config["topk_group"], scale=router.scale)
    return _latent("deepseek_v2", config, expert_layers(config, router, normalized=False))


def _v3(config: Fields) -> DecoderConfig:
    if not config.get("rope_interleave", True):
        raise UnsupportedModel("rope_interleave=False is not supported for the deepseek_v3 family")
    return _latent("deepseek_v3", config, expert_layers(config, balanced_router(config)))


def _glm_lite(config: Fields) -> DecoderConfig:
    refuse("glm4_moe_lite", config, "mlp_bias")
    if not config.get("rope_interleave", True):
        raise UnsupportedModel("rope_interleave=False is not supported for the glm4_moe_lite family")
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (config["num_hidden_layers"] - 1)]
    fields = {**config, "first_k_dense_replace": kinds.count("dense")}
    if "sparse" in kinds[: kinds.count("dense")]:
        raise UnsupportedModel("mlp_layer_types with dense layers after sparse ones is not supported")
    return _latent("glm4_moe_lite", fields, expert_layers(fields, balanced_router(config)))


def _dots1(config: Fields) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    return read_decoder(
        "dots1",
        config,
        feedforward=expert_layers(config, balanced_router(config), normalized=config.get("norm_topk_prob", False)),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
    )


def _write_dots1(config: DecoderConfig) -> dict[str, Any]:
    return {**write_experts(config), "attention_bias": config.qkv_bias, "layer_types": layer_types(config)}


def _dots1_rules(config: DecoderConfig) -> list[TensorRule]:
    return [*expert_rules()(config), *shared_expert()]


def balanced_router(config: Fields) -> RouterSpec:
    """DeepSeek 3's router, also that of GLM-4."""
    return RouterSpec(
        scores="sigmoid",
        choice_bias=True,
        num_groups=config.get("n_group") or 1,
        num_chosen_groups=config.get("topk_group") or 1,
        group_score="top two",
        scale=config.get("routed_scaling_factor", 1.0),
    )


def expert_layers(
    config: Fields, router: RouterSpec, *, normalized: bool | None = None
) -> Callable[[int], FeedForwardSpec]:
    """Dense layers first, then experts with shared ones, which are as one dense layer.

    Args:
        config: the contents of `config.json`.
        router: how tokens choose experts.
        normalized: whether weights sum to one; None to read it.
    """
    activation = activation_of(config)

    def feedforward(index: int) -> FeedForwardSpec:
        if index < config.get("first_k_dense_replace", 0):
            return FeedForwardSpec(config["intermediate_size"], activation)
        return FeedForwardSpec(
            config["moe_intermediate_size"],
            activation,
            num_experts=config["n_routed_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            norm_topk_prob=config.get("norm_topk_prob", True) if normalized is None else normalized,
            shared_intermediate_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
            shared_gate=False,
            router=router,
        )

    return feedforward


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `expert_layers` and `balanced_router` read."""
    specs = [layer.feedforward for layer in config.layers]
    dense = [spec for spec in specs if not spec.num_experts]
    sparse = next(spec for spec in specs if spec.num_experts)
    return {
        "first_k_dense_replace": len(dense),
        "intermediate_size": (dense or specs)[0].intermediate_size,
        "moe_intermediate_size": sparse.intermediate_size,
        "n_routed_experts": sparse.num_experts,
        "num_experts_per_tok": sparse.num_experts_per_tok,
        "n_shared_experts": sparse.shared_intermediate_size // sparse.intermediate_size,
        "norm_topk_prob": sparse.norm_topk_prob,
        "routed_scaling_factor": sparse.router.scale,
        "n_group": sparse.router.num_groups,
        "topk_group": sparse.router.num_chosen_groups,
    }


def experts_from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    """The fields that `expert_layers` and `balanced_router` read, from GGUF.

    Raises:
        UnsupportedModel: a router that does not score experts by sigmoids.
    """
    if (router := header.get("expert_gating_func", int, SIGMOID_ROUTER)) != SIGMOID_ROUTER:
        raise UnsupportedModel(
            f"{header.where}: expert_gating_func {router} is not supported, only {SIGMOID_ROUTER} is"
        )
    return expert_counts(header, fields)


def expert_counts(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    """The same, however experts are scored."""
    return {
        "n_routed_experts": fields["num_experts"],
        "n_shared_experts": header.get("expert_shared_count", int, 0),
        "first_k_dense_replace": header.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": header.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": header.get("expert_weights_norm", bool, False),
        "n_group": header.get("expert_group_count", int, 1),
        "topk_group": header.get("expert_group_used_count", int, 1),
    }


def experts_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that `experts_from_gguf` and llama.cpp read."""
    fields = write_experts(config)
    return {
        "feed_forward_length": fields["intermediate_size"],
        "expert_feed_forward_length": fields["moe_intermediate_size"],
        "expert_shared_count": fields["n_shared_experts"],
        "leading_dense_block_count": fields["first_k_dense_replace"],
        "expert_gating_func": SIGMOID_ROUTER,
        "expert_weights_scale": float(fields["routed_scaling_factor"]),
        "expert_weights_norm": fields["norm_topk_prob"],
        "expert_group_count": fields["n_group"],
        "expert_group_used_count": fields["topk_group"],
    }


def _latent(family: str, config: Fields, feedforward: Callable[[int], FeedForwardSpec]) -> DecoderConfig:
    bias = bool(config.get("attention_bias"))
    latent = LatentSpec(
        kv_rank=config["kv_lora_rank"],
        rotated_dim=config["qk_rope_head_dim"],
        plain_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        q_rank=config.get("q_lora_rank"),
        bias=bias,
    )
    check_size("kv_lora_rank", latent.kv_rank, 1 << 16)
    rotary = read_rotary({**config, "head_dim": latent.rotated_dim})
    return read_decoder(
        family,
        {**config, "num_key_value_heads": 1, "head_dim": latent.kv_rank + latent.rotated_dim},
        feedforward=feedforward,
        rotary=lambda index, local: rotary,
        attention=AttentionSpec(latent=latent),
        output_bias=bias,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    latent = config.layers[0].attention.latent
    if latent is None:
        raise UnsupportedModel(f"{config.family} models have latent attention in every layer")
    fields = {
        **write_experts(config),
        "num_key_value_heads": config.num_attention_heads,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_rope_head_dim": latent.rotated_dim,
        "qk_nope_head_dim": latent.plain_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rotated_dim,
        "attention_bias": latent.bias,
    }
    if config.family != "deepseek_v2":
        first = fields["first_k_dense_replace"]
        kinds = ["dense"] * first + ["sparse"] * (len(config.layers) - first)
        return fields | {"rope_interleave": True, "mlp_layer_types": kinds}
    grouped = fields["topk_group"] < fields["n_group"]
    return fields | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _rules(config: DecoderConfig) -> list[TensorRule]:
    latent = config.layers[0].attention.latent
    assert latent is not None
    names = {name: f"self_attn.{name}" for name in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa")}
    return [
        *expert_rules()(config),
        *shared_expert(),
        *rotated_rules(latent, names),
        keys_and_values(config),
        *keys_and_values_apart(config),
    ]


# --- GGUF -------------------------------------------------------------------------------------------------------------

_SOFTMAX_ROUTER: Final = 1
_GLM_VOCABULARY: Final = 154_880
"""By its vocabulary, and 47 or 48 layers, llama.cpp knows the one that scores by sigmoids without saying it."""
_PLAIN_QUERIES: Final = (26, 27)
"""Numbers of layers of the models that llama.cpp reads without latent vectors of queries."""


def _kind(header: GGUFHeader) -> str:
    """The family of a file of llama.cpp's DeepSeek 2."""
    glm = header.shapes.get("token_embd.weight", (0,))[0] == _GLM_VOCABULARY
    glm = glm and header.get("block_count", int) - header.get("nextn_predict_layers", int, 0) in (46, 47, 48)
    usual = SIGMOID_ROUTER if glm else _SOFTMAX_ROUTER
    scores = header.get("expert_gating_func", int, 0) or usual
    if scores == _SOFTMAX_ROUTER:
        return "deepseek_v2"
    return "glm4_moe_lite" if glm else "deepseek_v3"


def _from_gguf(header: GGUFHeader, fields: Fields) -> dict[str, Any]:
    softmax = _kind(header) == "deepseek_v2"
    scores = header.get("expert_gating_func", int, 0) or SIGMOID_ROUTER
    if not softmax and scores != SIGMOID_ROUTER:
        raise UnsupportedModel(
            f"{header.where}: expert_gating_func {scores} is not supported, only {_SOFTMAX_ROUTER} and "
            f"{SIGMOID_ROUTER} are"
        )
    header.get("expert_count", int)  # which models with dense layers alone lack
    found = {**latent_from_gguf(header, fields), **expert_counts(header, fields)}
    if softmax:
        grouped = found["topk_group"] < found["n_group"]
        found |= {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return found


_GROUPS = "llama.cpp scores a group of experts by the best two, DeepSeek 2 by the best one"


def _to_gguf(config: DecoderConfig) -> dict[str, Any]:
    spec = next(layer.feedforward for layer in config.layers if layer.feedforward.num_experts)
    latent = config.layers[0].attention.latent
    assert latent is not None
    count, plain = len(config.layers), latent.q_rank is None
    if plain != _has_plain_queries(config):
        raise UnsupportedModel(
            f"llama.cpp reads {config.family} models of {', '.join(map(str, _PLAIN_QUERIES))} layers (or 48 with "
            f"128256 tokens) without latent vectors of queries and all others with them, not {count} layers "
            f"{'without' if plain else 'with'} them"
        )
    router = spec.router
    grouped = router.num_chosen_groups < router.num_groups
    if grouped and router.group_score == "max":
        raise UnsupportedModel(_GROUPS)
    fields = {**experts_to_gguf(config), **latent_to_gguf(config)}
    if not spec.norm_topk_prob:
        fields["expert_weights_norm"] = None
    if not grouped:
        fields |= {"expert_group_count": 1, "expert_group_used_count": 1}
    return fields | {"expert_gating_func": SIGMOID_ROUTER if router.scores == "sigmoid" else _SOFTMAX_ROUTER}


def _has_plain_queries(config: DecoderConfig) -> bool:
    count = len(config.layers)
    return count in _PLAIN_QUERIES or (count == 48 and config.vocab_size == 128_256)


def _gguf(family: str) -> GGUFLayout:
    return GGUFLayout(
        "deepseek2",
        _from_gguf,
        _to_gguf,
        latent_gguf_rules,
        applies=lambda header: _kind(header) == family,
        any_head_dim=True,
    )


DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", _v2, _write, _rules, predicts_more=True, gguf=_gguf("deepseek_v2")
)
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", _v3, _write, _rules, predicts_more=True, gguf=_gguf("deepseek_v3")
)
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    _glm_lite,
    _write,
    _rules,
    predicts_more=True,
    gguf=_gguf("glm4_moe_lite"),
)


def _dots1_to_gguf(config: DecoderConfig) -> dict[str, Any]:
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModel(
            f"llama.cpp has dots1 models with as many key and value heads as query heads only, not "
            f"{config.num_key_value_heads} of {config.num_attention_heads}"
        )
    return experts_to_gguf(config)


_GGUF_DOTS1 = GGUFLayout("dots1", experts_from_gguf, _dots1_to_gguf, any_head_dim=True, own_output=True)
DOTS1 = Family("dots1", "Dots1ForCausalLM", _dots1, _write_dots1, _dots1_rules, gguf=_GGUF_DOTS1)
