"""Where a training step spends its time, by the same clocks on both sides."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Phases:
    """Seconds by phase, from clocks around functions. A clock that starts inside another one stops it meanwhile."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """Start a clock."""
        self._book()
        self._running.append(phase)

    def leave(self) -> None:
        """Stop the clock that was started last; the one before it goes on."""
        self._book()
        self._running.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now

    def clocked(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a clock around it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed

    def watch_torch(self) -> None:
        """Put clocks around torch's backward pass, gradient clipping and optimizers, for the rest of this process."""
        torch.autograd.backward = self.clocked("backward", torch.autograd.backward)
        torch.nn.utils.clip_grad_norm_ = self.clocked("optimizer", torch.nn.utils.clip_grad_norm_)
        register_optimizer_step_pre_hook(lambda *_: self.enter("optimizer"))
        register_optimizer_step_post_hook(lambda *_: self.leave())

    def take(self, *needed: str) -> dict[str, float]:
        """The seconds of each phase since the last call.

        Raises:
            RuntimeError: a phase of ``needed`` was never entered: the work went past its clock.
        """
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        missing = [phase for phase in needed if phase not in taken]
        if missing:
            raise RuntimeError(f"no time was seen in {', '.join(missing)}: the step does not go through that clock")
        return taken
