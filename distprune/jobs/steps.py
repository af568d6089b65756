"""The steps of a fine-tuning job, from the last state that was saved to the end."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch

from distprune.calibration import Batches, check_fit
from distprune.checkpoint import remove_files
from distprune.collectives import sum_together, together
from distprune.jobs.finetune_job import FinetuneJob
from distprune.jobs.journal import Item
from distprune.jobs.masked_training import MaskedTraining
from distprune.jobs.run import Run
from distprune.jobs.training_state import state_digest
from distprune.jobs.unfinished import STATE, Unfinished

__all__ = ["begin", "train"]

_WARM_UP = 0.1  # of the job: the learning rate rises, and then falls to zero
_NUM_SAID = 20  # times that the loss is


def begin(job: FinetuneJob, run: Run, training: MaskedTraining, unfinished: Unfinished) -> int:
    """Read the last state back, if there is one; return after how many steps it was. Every rank must call it.

    Raises:
        ValueError: on every rank: the state is not as it was written, or lies beside files of others.
    """
    if not (saved := unfinished.items(STATE)):
        if job.resume:
            run.told.say("nothing was saved yet: starting at the first step")
        return 0
    num_steps: int = saved[-1].value["num_steps"]
    path = unfinished.state(num_steps)
    digest = state_digest(run.comm, path)
    with together(run.comm):
        if digest != saved[-1].digest:
            raise ValueError(f"{path} is not as it was written; remove {unfinished.folder} and start anew")
    training.read(path, num_steps)
    run.told.say(f"going on after step {num_steps}")
    return num_steps


def train(
    job: FinetuneJob, run: Run, training: MaskedTraining, batches: Batches, unfinished: Unfinished
) -> tuple[float, list[float]]:
    """Do all steps that are left; return the seconds and the losses of all, those of earlier runs too.

    Every rank must call it: three rounds a step. What time it is the first rank says.

    Raises:
        ValueError: on every rank: a loss, or a gradient, that is no finite number.
    """
    saves = [item.value for item in unfinished.items(STATE)]
    losses: list[float] = [loss for saved in saves for loss in saved["losses"]]
    before: float = saves[-1]["seconds"] if saves else 0.0
    seconds = before
    num_saved, started = len(losses), time.perf_counter()
    saved_at = started  # a save may take longer than the time between two: it counts from the end of the last

    def fill(words: torch.Tensor, own: tuple[float, float]) -> None:
        now = time.perf_counter()
        clocks = [before + now - started, now - saved_at] if run.comm.rank == 0 else [0.0, 0.0]
        words.copy_(torch.tensor([*own, *clocks], dtype=torch.float64))

    unit, total = ("steps", job.steps or 0) if job.minutes is None else ("seconds", math.ceil(60 * job.minutes))
    with run.told.stage("training", unit) as progress:
        while (share := job.share(len(losses), seconds)) < 1:
            with together(run.comm):
                run.told.check_here()
                batch = batches[len(losses)]
                check_fit(batch, training.model)
            own = training.backward(batch)
            sums = sum_together(run.comm, (4,), partial(fill, own=own), torch.float64)
            loss, squares, seconds, unsaved_seconds = sums.tolist()
            if not math.isfinite(loss + squares):
                kept = f"; the state after step {num_saved} is kept" if num_saved else ""
                raise ValueError(
                    f"step {len(losses) + 1}: the loss is {loss:g} and the squared norm of its gradient {squares:g}; "
                    f"try a lower --learning-rate, or --compute-dtype float32{kept}"
                )
            now = min(job.share(len(losses) + 1, seconds), 1.0)
            with together(run.comm):
                training.step(job.learning_rate * _factor((share + now) / 2), math.sqrt(squares))
            losses.append(loss)
            if int(now * _NUM_SAID) > int(share * _NUM_SAID) or len(losses) == 1:
                run.told.say(f"step {len(losses)}: loss {loss:.4f}, {now:.0%} done")
            progress(round(now * total), total)
            if now < 1 and unsaved_seconds >= job.save_every:
                saved = {"num_steps": len(losses), "seconds": seconds, "losses": losses[num_saved:]}
                _save(run, training, unfinished, saved)
                num_saved, saved_at = len(losses), time.perf_counter()
    return seconds, losses


def _factor(share: float) -> float:
    """Return the learning rate beside its highest, when so much of the job is done."""
    return min(share / _WARM_UP, (1 - share) / (1 - _WARM_UP))


def _save(run: Run, training: MaskedTraining, unfinished: Unfinished, saved: dict[str, Any]) -> None:
    """Write the state beside the one before, and have the journal name it. Every rank must call it."""
    path = unfinished.state(saved["num_steps"])
    training.write(path)
    digest = state_digest(run.comm, path)
    with together(run.comm):
        unfinished.record(Item(STATE, saved, digest))
        if run.comm.rank == 0:
            for other in unfinished.states:
                if other != path:
                    remove_files(other)
