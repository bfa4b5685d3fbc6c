"""Same seed, same bytes: what must be equal for that, and switching it on."""

import os
import platform
from pathlib import Path

import torch
import torch.utils.deterministic as torch_deterministic


def make_deterministic(threads: int) -> None:
    """Fix the thread count and forbid algorithms whose result depends on timing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses products on a GPU
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling new memory with NaN only helps to find reads of what was never written, and costs a tenth of an update.
    setattr(torch_deterministic, "fill_uninitialized_memory", False)  # noqa: B010  (torch does not declare it)


def cpu_family() -> str:
    """Vendor, family, model and widest vector unit: CPUs that share these give the same bytes."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    identity = [fields.get(name, "") for name in ("vendor_id", "cpu family", "model")]
    known = " ".join(part for part in identity if part) or platform.processor() or platform.machine()
    return f"{known} {torch.backends.cpu.get_cpu_capability()}"
