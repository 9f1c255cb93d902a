"""Reasons to stop that one host sees, and all follow after the same update."""

import collections
from collections.abc import Sequence

import jax
import numpy as np

from transformer_jax import parallel
from transformer_jax.hosts import Hosts
from transformer_jax.train.ending import Ending

RUN_AHEAD = 2  # updates queued on the device before the host waits for one


class Stops:
    """A signal that a host received, or the hours that are over by its clock.

    With several hosts each tells the devices before every update what it sees. The
    largest of these numbers is read `RUN_AHEAD` updates later, so no host waits for it,
    and all hosts read the same number after the same update.
    """

    def __init__(self, hosts: Hosts, ending: Ending, signals: Sequence[int]) -> None:
        """Takes what is asked: the clock, and the list that signals are added to."""
        self._alone, self._ending, self._signals = hosts.alone, ending, signals
        self._asked: collections.deque[jax.Array] = collections.deque()
        self._agreed = 0, 0

    @property
    def signum(self) -> int:
        """The signal to stop by; 0: none."""
        return self._own[0] if self._alone else self._agreed[0]

    @property
    def late(self) -> bool:
        """Whether the hours are over."""
        return self._ending.late if self._alone else bool(self._agreed[1])

    @property
    def _own(self) -> tuple[int, int]:
        return (self._signals[0] if self._signals else 0), int(self._ending.late)

    def ask(self) -> int:
        """Returns the signal to stop by before the next update; 0: none."""
        if not self._alone:
            self._asked.append(parallel.largest(self._own))
            if len(self._asked) > RUN_AHEAD:
                signum, late = np.asarray(self._asked.popleft()).tolist()
                self._agreed = signum, late
        return self.signum
