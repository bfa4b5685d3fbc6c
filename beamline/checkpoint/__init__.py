"""Checkpoints: atomic, checksummed, readable by any layout; no torch and no pickle.

::

    <directory>/latest                                 text: the step of the newest checkpoint
    <directory>/global_step_25/policy/rank_00000.safetensors     one file a rank: slices under Hugging Face names
                              /optimizer/rank_00000.safetensors  the same for optimizer state: name/exp_avg, ...
                              /learner.json                      small state of the learner (any name, one file each)
                              /run_state.json                    where the run stands
                              /manifest.json                     written last: step, and size and sha256 of each file
    <directory>/.global_step_25.staging                a save that has not finished; removed by the next one
    <directory>/.global_step_25.replaced               the old step 25, until the new one stands
    <directory>/.global_step_20.trash                  being deleted

A folder ``global_step_<n>`` with a manifest is a complete checkpoint. :mod:`~beamline.checkpoint.files` has the file
operations, also for other files that must be whole or absent.
"""

from beamline.checkpoint.errors import CheckpointError
from beamline.checkpoint.files import FileDigest, remove_tree, rename_folder, write_atomic
from beamline.checkpoint.manifest import Checkpoint, open_checkpoint, verify
from beamline.checkpoint.shards import Group, ShardReader, ShardWriter
from beamline.checkpoint.store import CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "FileDigest",
    "Group",
    "ShardReader",
    "ShardWriter",
    "open_checkpoint",
    "remove_tree",
    "rename_folder",
    "verify",
    "write_atomic",
]
