"""Problems: where they come from, which are left out and why, and the order in which they are trained on."""

from beamline.data.order import problem_indices
from beamline.data.problems import DataError, Excluded, ProblemSet, check_disjoint, load, usable

__all__ = ["DataError", "Excluded", "ProblemSet", "check_disjoint", "load", "problem_indices", "usable"]
