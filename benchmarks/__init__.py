"""Side-by-side measurements; see docs/benchmarks.md."""
