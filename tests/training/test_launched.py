"""Accelerate's wrappers are held whether they come before or after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.started import run_script

ACCELERATED = """
import sys
import torch
from accelerate import Accelerator
import distprune as prune
from tests.training.test_hold import INCLUDE, held_bits
from tests.wrapped import batches, transformer

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
for hold_first in (True, False):
    model = transformer()
    prune.prune_model(model, 0.5, include=INCLUDE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if hold_first:
        hold = prune.hold_zeros(model, optimizer, include=INCLUDE)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not hold_first:
        hold = prune.hold_zeros(model, optimizer, include=INCLUDE)
    before = held_bits(model)
    for tokens in batches(6):
        own = tokens.chunk(accelerator.num_processes)[accelerator.process_index]
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, held_bits(model), before))
    assert hold.counts().sparsity == 0.5
    hold.remove()
print(f"held on {accelerator.num_processes}", flush=True)
accelerator.end_training()
"""


@pytest.mark.launcher
def test_accelerate(tmp_path: Path) -> None:
    script = tmp_path / "accelerated.py"
    script.write_text(ACCELERATED)
    assert run_script(2, tmp_path, str(script)).count("held on 2") == 2
