"""Measurements against peers and limits. Results: benchmarks/results, docs/benchmarks.md."""

import beamline  # noqa: F401  before torch, because it sets how long torch's idle threads spin
