"""Facts of model families, without torch: tensors, shapes, shards."""
