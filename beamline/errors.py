"""Failures that the user can mend: their message says what, where, which value and what to do."""


class BeamlineError(Exception):
    """Base of all of them. The command line prints the message alone and ends with ``exit_code``."""

    exit_code = 1
