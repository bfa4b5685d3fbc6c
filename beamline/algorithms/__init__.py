"""The mathematics of the update: pure functions that know nothing of engines."""
