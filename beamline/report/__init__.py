"""What a run leaves for people: metrics, rollout dumps, and one page that shows them. Imports no torch."""

from beamline.report.metrics import MetricsWriter, read_metrics, reproducible, truncate_after
from beamline.report.page import write_report
from beamline.report.problems import evaluation_folder, find_evaluations
from beamline.report.rollouts import RolloutRow, read_rollouts, rollouts_path, write_rollouts

__all__ = [
    "MetricsWriter",
    "RolloutRow",
    "evaluation_folder",
    "find_evaluations",
    "read_metrics",
    "read_rollouts",
    "reproducible",
    "rollouts_path",
    "truncate_after",
    "write_report",
    "write_rollouts",
]
