"""Memory of host and device does not grow from epoch to epoch."""

import gc
import pathlib
import re

import jax
import pytest
import tiny

from transformer_jax.train import loop

FIRST, LAST = 5, 35  # epochs after which it is measured
GROWTH = 24.0  # MB that the host's may grow in those 30 epochs; 12 were seen


def resident() -> float:
    """Returns this process's memory in MB."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


@pytest.mark.slow
def test_memory_is_flat_over_epochs(tmp_path, monkeypatch):
    """With a log, an evaluation, and a checkpoint in each epoch."""
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("the system does not tell")
    update, seen = loop.Trainer.update, {}

    def watched(self, state, batch):
        epoch, position = divmod(len(seen), self.batches.batches_per_epoch)
        new = update(self, state, batch)
        host = device = 0.0
        if position == 0 and epoch in (FIRST, LAST):
            jax.block_until_ready(new)
            self.checkpoints.wait()
            gc.collect()
            host, device = resident(), sum(x.nbytes for x in jax.live_arrays())
        seen[len(seen)] = epoch, host, device
        return new

    monkeypatch.setattr(loop.Trainer, "update", watched)
    config = tiny.write_config(tmp_path, train__steps=10_000, train__epochs=LAST + 1.0)
    often = [f"--config.train.{name}_every=4" for name in ("log", "eval", "save")]
    assert tiny.train(config, tmp_path / "run", often) == 0
    first, last = (
        next(
            (host, device) for at, host, device in seen.values() if at == epoch and host
        )
        for epoch in (FIRST, LAST)
    )
    print(f"after epoch {FIRST}: {first}, after epoch {LAST}: {last}")
    assert last[1] <= first[1]
    assert last[0] - first[0] < GROWTH
