"""Problems: where they come from, which are left out and why, and the order in which they are trained on."""

from beamline.data.errors import DataError
from beamline.data.order import Part, problem_indices
from beamline.data.overlap import check_disjoint
from beamline.data.problem_set import Excluded, ProblemSet
from beamline.data.problems import from_rows, load, mixture, usable

__all__ = [
    "DataError",
    "Excluded",
    "Part",
    "ProblemSet",
    "check_disjoint",
    "from_rows",
    "load",
    "mixture",
    "problem_indices",
    "usable",
]
