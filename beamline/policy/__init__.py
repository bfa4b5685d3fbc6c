"""The model being trained, in torch: loading, packed attention, the log-probability head, its weights by name."""
