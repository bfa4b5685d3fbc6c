"""Why sampler and learner disagree on log-probabilities: one cause switched after another, on a batch that stays.

:mod:`~beamline.runtime.subject` says whose engines are compared, :mod:`~beamline.mismatch.frozen` draws the batch,
:mod:`~beamline.mismatch.evaluator` evaluates it under any setup between the two engines, and
:mod:`~beamline.mismatch.causes` measures each cause.
"""
