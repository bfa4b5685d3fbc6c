"""What goes wrong with problems: a set that cannot be used, a row that is left out."""

from beamline.errors import BeamlineError


class DataError(BeamlineError, ValueError):
    """A problem set that cannot be used, with the file and the reason."""


class UnusableError(Exception):
    """Why one row or problem is left out; never leaves this package."""
