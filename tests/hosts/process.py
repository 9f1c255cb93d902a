"""The program, with faults: started as a process of its own by the tests of hosts.

The first argument is a JSON object: `devices` to simulate; `silence`, `stall` and
`shared`, seconds; `raises`, the update in which this process fails; `sleeps`, the batch
before which it falls asleep; `code`, a digest of other code.
"""

import json
import os
import sys
import time
from typing import Any

FAULTS = json.loads(sys.argv.pop(1)) if __name__ == "__main__" else {}


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=0"  # no second start
    os.environ["XLA_FLAGS"] = " ".join(
        [
            f"--xla_force_host_platform_device_count={FAULTS.get('devices', 1)}",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
        ]
    )
    # Most of the time is compiling; the processes of all tests share what is compiled.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    from transformer_jax import channel, cli, hosts
    from transformer_jax.data.pipeline import TrainBatches
    from transformer_jax.errors import TrainingError
    from transformer_jax.train.loop import Trainer

    channel.SILENCE = FAULTS.get("silence", channel.SILENCE)
    channel.STALL = FAULTS.get("stall", channel.STALL)
    hosts.SHARED = FAULTS.get("shared", hosts.SHARED)
    if "code" in FAULTS:
        found = hosts._versions()
        changed = {**found, "the code of transformer_jax": FAULTS["code"]}
        hosts._versions = lambda: changed
    batch, update = TrainBatches.batch, Trainer.update

    def slow_batch(self: Any, number: int) -> Any:
        if number == FAULTS.get("sleeps"):
            time.sleep(FAULTS["seconds"])
        return batch(self, number)

    def failing_update(self: Any, state: Any, batches: Any) -> Any:
        failing_update.calls += 1
        if failing_update.calls == FAULTS.get("raises"):
            raise TrainingError("the memory of this host is full")
        if failing_update.calls == FAULTS.get("crashes"):
            raise RuntimeError("a fault of ours")
        return update(self, state, batches)

    failing_update.calls = 0
    TrainBatches.batch, Trainer.update = slow_batch, failing_update
    cli.program()


if __name__ == "__main__":
    main()
