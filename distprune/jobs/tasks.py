"""Tasks of lm-eval (EleutherAI's language model evaluation harness), answered by a model on its ranks as it is.

Every rank runs the harness and asks the same requests; the ranks share the forwards out among themselves, and each
gets all answers.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distprune.checkpoint.optional_packages import import_extra
from distprune.collectives.base import Communicator
from distprune.collectives.guarded import guarding
from distprune.evaluation import Continuation, Progress, log_likelihoods

_EXTRA = "tasks"
_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")  # output types without generated text
_FEW_SHOT_SEED = 1234  # lm_eval.evaluator's
_BOOTSTRAP = 100  # resamplings for standard errors that have no formula
_ROLLING_WINDOWS = 1 << 20  # that the harness hands over at a time
_MAX_MESSAGE = 500  # characters


def load_tasks(names: Sequence[str]) -> Any:
    """Return the tasks or groups ``names`` of lm-eval, or of YAML files, with their data. Local.

    Raises:
        ImportError: the extra ``tasks`` is not installed.
        ValueError: there is no such task, its data cannot be had, or it is scored by text that a model generates.
    """
    manager_type = import_extra("lm_eval.tasks", _EXTRA).TaskManager
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        tasks = manager_type().load(list(names))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_MESSAGE]
        raise ValueError(f"lm-eval cannot load the tasks {', '.join(names)}: {said}") from error
    for name, task in tasks["tasks"].items():
        if task.OUTPUT_TYPE not in _SCORED:
            raise ValueError(
                f"the task {name!r} is scored by generated text ({task.OUTPUT_TYPE}), which is not done here: choose "
                "tasks that are scored by likelihood, or run lm-eval on the output"
            )
        if task.get_config("num_fewshot") is None:  # both as lm_eval.simple_evaluate does
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
    return tasks


def run_tasks(
    tasks: Any, model: nn.Module, tokenizer: Any, comm: Communicator, progress: Progress = None
) -> dict[str, dict[str, float]]:
    """Return every task's and group's metrics: ``{"arc_easy": {"acc": 0.5, "acc_stderr": 0.01}}``.

    Every rank must call it, with the same tasks of :func:`load_tasks`. The rounds of :func:`log_likelihoods` for each
    kind of request, one of 64 bytes before each and one at the end; what the first rank has found is sent to all.

    Raises:
        Exception: on every rank: what a forward, or the harness on one rank, raised.
    """
    harness = import_extra("lm_eval.evaluator", _EXTRA)
    metrics: dict[str, dict[str, float]] = {}
    # The harness takes every rank for the first, and would draw its bars on each.
    hidden = contextlib.redirect_stderr(io.StringIO()) if comm.rank else contextlib.nullcontext()
    with guarding(comm) as ranks, hidden:
        answering = _harness_model(model, tokenizer, ranks, progress)
        results = harness.evaluate(answering, tasks, bootstrap_iters=_BOOTSTRAP, log_samples=False)["results"]
        for name, values in results.items():
            # A metric and its filter, such as "acc,none".
            numbers = {key: value for key, value in values.items() if "," in key and isinstance(value, int | float)}
            metrics[name] = {key.removesuffix(",none"): float(value) for key, value in numbers.items()}
    shared: dict[str, dict[str, float]] = comm.broadcast(metrics)
    return shared


def _harness_model(model: nn.Module, tokenizer: Any, comm: Communicator, progress: Progress) -> Any:
    """Return lm-eval's model around ``model``: what is tokenized and where it is cut is its own."""
    base: Any = import_extra("lm_eval.models.huggingface", _EXTRA).HFLM

    class OnRanks(base):  # type: ignore[misc]
        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            asked = []
            for _, context, continuation in requests:
                # Cut from the left to what the model has positions for, as the harness does.
                ids = torch.tensor([*context, *continuation][-(self.max_length + 1) :], dtype=torch.int64, device="cpu")
                asked.append(Continuation(ids[:-1], ids[1:][-len(continuation) :]))
            scored = log_likelihoods(model, asked, group=comm, progress=progress)
            return [(likelihood, bool(is_greedy)) for likelihood, is_greedy in scored.tolist()]

    return OnRanks(pretrained=model, tokenizer=tokenizer, batch_size=_ROLLING_WINDOWS, trust_remote_code=False)
