"""The learner over Megatron-Core: a Beam spread over tensor, expert, pipeline and data ranks."""
