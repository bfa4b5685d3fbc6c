"""Beam, torch-free: its shape and the name, size and type of every tensor of its checkpoint."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from beamline.errors import BeamlineError
from beamline.model.layout import DType

LayerType = Literal["sliding_attention", "full_attention"]
MlpType = Literal["dense", "sparse"]


class ModelError(BeamlineError, ValueError):
    """A model folder that cannot be used, with the file, the value and the reason."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint. ``dtype`` is the stored type: the router stays float32 whatever the rest is."""

    name: str
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class BeamShape:
    """The numbers of a Beam ``config.json`` that fix its tensors and its behaviour; names are that file's.

    Raises:
        ModelError: numbers that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_window: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    final_logit_softcapping: float
    rms_norm_eps: float
    layer_types: tuple[LayerType, ...]
    mlp_layer_types: tuple[MlpType, ...]

    def __post_init__(self) -> None:
        layers, heads, kv_heads = self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads
        experts, groups = self.num_experts, self.n_group
        available = self.topk_group * (experts // max(groups, 1))
        unknown = {*self.layer_types, *self.mlp_layer_types} - {*get_args(LayerType), *get_args(MlpType)}
        rules = [
            (len(self.layer_types) == layers, f"layer_types has {len(self.layer_types)} entries for {layers} layers"),
            (len(self.mlp_layer_types) == layers, f"mlp_layer_types has {len(self.mlp_layer_types)} of {layers}"),
            (not unknown, f"layers of unknown type {', '.join(sorted(map(repr, unknown)))}"),
            (
                kv_heads > 0 and heads % kv_heads == 0,
                f"num_attention_heads={heads} over num_key_value_heads={kv_heads}",
            ),
            (groups > 0 and experts % groups == 0, f"num_experts={experts} cannot be cut into n_group={groups}"),
            (0 < self.topk_group <= groups, f"topk_group={self.topk_group} is not in 1..n_group={groups}"),
            (
                groups <= 0 or experts // groups >= 2,
                f"n_group={groups} leaves {experts // max(groups, 1)} of {experts} experts to a group, "
                "which is judged by its best 2",
            ),
            (
                self.num_experts_per_tok <= available,
                f"num_experts_per_tok={self.num_experts_per_tok} but {self.topk_group} groups hold {available} experts",
            ),
            (self.head_dim % 2 == 0, f"head_dim={self.head_dim} is odd: it cannot be rotated in halves"),
            (
                self.hidden_size % 4 == 0 and self.moe_intermediate_size % 4 == 0,
                f"hidden_size={self.hidden_size} and moe_intermediate_size={self.moe_intermediate_size} must be "
                "multiples of 4 for grouped matrix products",
            ),
            (
                self.sliding_window <= self.max_position_embeddings,
                f"sliding_window={self.sliding_window} is larger than the context, "
                f"max_position_embeddings={self.max_position_embeddings}",
            ),
        ]
        problems = [text for valid, text in rules if not valid]
        if problems:
            raise ModelError("model shape: " + "; ".join(problems))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "BeamShape":
        """Take the shape out of a Hugging Face configuration.

        Raises:
            ModelError: another model family, a missing number, or numbers that contradict each other.
        """
        if config.get("model_type") != "beam":
            raise ModelError(
                f"model_type is {config.get('model_type')!r}; this model family is not supported: use 'beam'"
            )
        missing = [field.name for field in fields(cls) if config.get(field.name) is None]
        if missing:
            raise ModelError(f"the model's configuration lacks {', '.join(missing)}")
        wrong = [f"{f.name}={config[f.name]!r}" for f in fields(cls) if not _is_valid(config[f.name], f.type)]
        if wrong:
            raise ModelError(f"the model's configuration has {', '.join(wrong)}: not a positive number")
        _check_family(config)
        values = {field.name: config[field.name] for field in fields(cls)}
        values["layer_types"] = tuple(values["layer_types"])
        values["mlp_layer_types"] = tuple(values["mlp_layer_types"])
        return cls(**values)

    @classmethod
    def from_folder(cls, folder: Path) -> "BeamShape":
        """Read ``config.json`` of a model folder.

        Raises:
            ModelError: no folder, no file, not JSON, or not a usable Beam.
        """
        path = folder / "config.json"
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist")
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelError(f"{path} is missing: {folder} is not a Hugging Face model folder") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path} holds a {type(config).__name__}, not an object")
        try:
            return cls.from_config(config)
        except (ModelError, TypeError) as error:
            raise ModelError(f"{path}: {error}") from error

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global indices of the layers with experts; entry l is the layer of route row l."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")


def _is_valid(value: object, kind: object) -> bool:
    if kind not in (int, float):
        return True
    return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool) and value > 0


def _check_family(config: Mapping[str, Any]) -> None:
    """Refuse what the module of transformers would do and no engine here does."""
    fixed = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0, "tie_word_embeddings": False}
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ModelError(f"{name}={config[name]!r} is not supported: Beam has {value!r}")
    rope = config.get("rope_parameters") or {}
    sliding, full = rope.get("sliding_attention") or {}, rope.get("full_attention")
    if sliding.get("rope_type", "default") != "default" or full is not None:
        raise ModelError(
            f"rope_parameters={rope!r} is not supported: Beam has rope_type 'default' in sliding layers and null "
            "(no rotation) in full layers"
        )
    if rope and not isinstance(sliding.get("rope_theta"), int | float):
        raise ModelError(f"rope_parameters={rope!r} lacks rope_theta for sliding_attention")


def tensors(shape: BeamShape, dtype: DType = "bfloat16") -> Iterator[TensorSpec]:
    """Every tensor of a Beam checkpoint under its Hugging Face name, in layer order."""
    D = shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    yield TensorSpec("model.embed_tokens.weight", (shape.vocab_size, D), dtype)
    for layer in range(shape.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in (("q", q, D), ("k", kv, D), ("v", kv, D), ("gate", q, D), ("o", D, q)):
            yield TensorSpec(f"{at}.self_attn.{name}_proj.weight", (rows, columns), dtype)
        yield TensorSpec(f"{at}.self_attn.gate_bias", (shape.num_attention_heads,), dtype)
        for name in ("q_norm", "k_norm"):
            yield TensorSpec(f"{at}.self_attn.{name}.weight", (shape.head_dim,), dtype)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield TensorSpec(f"{at}.{name}_layernorm.weight", (D,), dtype)
        if shape.mlp_layer_types[layer] == "dense":
            yield from _swiglu(f"{at}.mlp", D, shape.intermediate_size, dtype)
        else:
            yield TensorSpec(f"{at}.mlp.gate.weight", (shape.num_experts, D), "float32")
            yield TensorSpec(f"{at}.mlp.gate.e_score_correction_bias", (shape.num_experts,), "float32")
            for expert in range(shape.num_experts):
                yield from _swiglu(f"{at}.mlp.experts.{expert}", D, shape.moe_intermediate_size, dtype)
    yield TensorSpec("model.norm.weight", (D,), dtype)
    yield TensorSpec("lm_head.weight", (shape.vocab_size, D), dtype)


def _swiglu(at: str, hidden: int, width: int, dtype: DType) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.gate_proj.weight", (width, hidden), dtype)
    yield TensorSpec(f"{at}.up_proj.weight", (width, hidden), dtype)
    yield TensorSpec(f"{at}.down_proj.weight", (hidden, width), dtype)
