"""The data that flows through a run: Problem -> Request -> Completion -> Rollout -> Group -> Batch.

Records hold numpy arrays and import no torch, so that they cross process borders without copies and can be read
by tools that have no deep-learning stack.

Shape suffixes, used all over the package:

====== =========================================================
``S``  tokens of one sequence (prompt and everything after it)
``N``  rows over all sequences of a packed batch
``B``  sequences of a batch
``B1`` ``B + 1`` borders of the sequences in the packed rows
``L``  MoE layers, counted by global index; dense layers never appear
``K``  experts chosen for a token
``E``  experts of a layer
``D``  hidden width
``V``  vocabulary
====== =========================================================
"""

from beamline.records.batch import Batch, Experience, pack
from beamline.records.problem import Message, Problem
from beamline.records.rollout import Grade, GradeStatus, Group, Rollout, Turn
from beamline.records.sampling import Completion, Finish, Key, Request, SamplingParams, Split, Support

__all__ = [
    "Batch",
    "Completion",
    "Experience",
    "Finish",
    "Grade",
    "GradeStatus",
    "Group",
    "Key",
    "Message",
    "Problem",
    "Request",
    "Rollout",
    "SamplingParams",
    "Split",
    "Support",
    "Turn",
    "pack",
]
