"""Several ranks of an engine on one GPU, which NCCL refuses: they share the device and talk through the host (gloo).

All else is as with a GPU for each: processes, shards, weights by CUDA IPC, routes. Each rank imports this module, for
:class:`SharingExtension`, before it looks for its device.
"""

from typing import Any

import torch
from vllm.platforms import current_platform

from beamline.rollout.vllm.worker import WeightsExtension


class SharingExtension(WeightsExtension):
    """Ours, as it is."""


platform: Any = type(current_platform)
platform.dist_backend = "gloo"
platform.logical_device_id_to_visible_device_id = classmethod(lambda cls, device_id: 0)
torch.accelerator.device_count = lambda: 8
