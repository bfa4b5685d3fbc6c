"""The configuration of a run: its schema, and how recipes and overrides become one. Imports no torch.

``beamline.config.describe`` documents every key.
"""

from beamline.config.compose import differences, load_config, to_yaml
from beamline.config.errors import ConfigError, Problem
from beamline.config.schema import RunConfig

__all__ = ["ConfigError", "Problem", "RunConfig", "differences", "load_config", "to_yaml"]
