"""The error of the package."""

from beamline.errors import BeamlineError


class CheckpointError(BeamlineError, RuntimeError):
    """A checkpoint is missing, damaged, incomplete or does not fit; the message names the file and what to do."""
