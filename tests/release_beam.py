"""The shape of the released model, Beam-1.0-501B-A23B."""

from beamline.model.beam import BeamShape

LAYERS, DENSE = 52, 3
RELEASE = BeamShape(
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=20_480,
    num_hidden_layers=LAYERS,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1_048_576,
    sliding_window=512,
    moe_intermediate_size=2560,
    num_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    final_logit_softcapping=30.0,
    rms_norm_eps=1e-6,
    layer_types=tuple(
        "full_attention" if (i + 1) % 6 == 0 or i == LAYERS - 1 else "sliding_attention" for i in range(LAYERS)
    ),
    mlp_layer_types=tuple("dense" if i < DENSE else "sparse" for i in range(LAYERS)),
)
