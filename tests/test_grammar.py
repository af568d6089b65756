"""One grammar: the same thing has the same name, place and default in calls, jobs and on the command line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import distprune
from distprune import jobs
from distprune.jobs import BareJob
from distprune.jobs.options import options_of

REQUIRED = inspect.Parameter.empty
# What two calls share, or a call and a job: in its order, with its default.
GRAMMAR: dict[str, Any] = {
    "model": REQUIRED,
    "optimizer": REQUIRED,
    "samples": 128,
    "sequence_length": 2048,
    "tokenizer": None,
    "beginnings": None,
    "temperature": 1.0,
    "top_k": 1000,
    "sparsity": None,
    "mlp": None,
    "heads": None,
    "kv_groups": None,
    "experts": None,
    "layers": None,
    "parameters": None,
    "criterion": "obs",
    "layer_criterion": "loss",
    "expert_criterion": "output",
    "method": "admm",
    "score": "magnitude",
    "pattern": "unstructured",
    "scope": None,
    "every": 1,
    "seed": 0,
    "evidence": None,
    "sequential": None,
    "targets": None,
    "target_share": None,
    "refit": None,
    "permute": None,
    "epochs": None,
    "include": (),
    "exclude": (),
    "dtype": None,
    "overwrite": False,
    "group": None,
    "offload": False,
    "batch_tokens": None,
    "expert_memory": 4 << 30,
    "progress": None,
}
# What deviates: the default, and why.
TOKEN_IDS = (REQUIRED, "token ids themselves, not how many windows of them")
ONE_SHARE = (REQUIRED, "nothing else says how much")
BY_WEIGHTS = ("magnitude", "a job without windows")
DEVIATING: dict[str, dict[str, tuple[Any, str]]] = {
    "prune_blocks": {"samples": TOKEN_IDS},
    "allocate": {"samples": TOKEN_IDS, "sparsity": ONE_SHARE},
    "shrink_model": {"samples": TOKEN_IDS},
    "perplexity": {"samples": TOKEN_IDS, "sequence_length": (None, "that of the samples")},
    "calibration_windows": {"tokenizer": (REQUIRED, "text is nothing without one; it stands beside the text")},
    "FinetuneJob": {"sequence_length": (256, "of windows to train on")},
    "erk": {"sparsity": ONE_SHARE},
    "constant": {"sparsity": ONE_SHARE},
    "at_once": {"sparsity": ONE_SHARE},
    "PruneJob": {"method": BY_WEIGHTS},
    "StreamedJob": {"method": BY_WEIGHTS},
    "StraightThrough": {"pattern": ("2:4", "the pattern itself says how much")},
    "hold_zeros": {"optimizer": (None, "zeros are held in backward passes without one, too")},
}
FLAGS = {"evaluate_on": "--eval", "evaluation_tokens": "--eval-tokens", "evaluation_length": "--eval-length"}

CALLS = {
    name: {parameter.name: parameter.default for parameter in inspect.signature(call).parameters.values()}
    for name, call in vars(distprune).items()
    if name in distprune.__all__
    and (inspect.isfunction(call) or call in (distprune.SparseTraining, distprune.StraightThrough))
    and not call.__module__.startswith("distprune.pruning.torch_api")  # the grammar of torch.nn.utils.prune
}
JOBS = {name: job for name, job in vars(jobs).items() if isinstance(job, type) and issubclass(job, BareJob)}


def fields_of(job: type[BareJob]) -> dict[str, Any]:
    return {of.name: REQUIRED if of.default is dataclasses.MISSING else of.default for of in dataclasses.fields(job)}


def in_order(names: Sequence[str]) -> bool:
    places = [list(GRAMMAR).index(name) for name in names if name in GRAMMAR]
    return places == sorted(places)


def test_names_that_are_shared_are_in_the_grammar() -> None:
    of_jobs = {name for job in JOBS.values() for name in fields_of(job)}
    of_calls = [name for call in CALLS.values() for name in call]
    shared = {name for name in of_calls if of_calls.count(name) > 1 or name in of_jobs}
    assert shared == set(GRAMMAR)


def test_defaults_are_the_same() -> None:
    """A deviation that is stated is one, so that none is left here when it is gone."""
    every: Mapping[str, Mapping[str, Any]] = CALLS | {name: fields_of(job) for name, job in JOBS.items()}
    found = {
        call: {name: default for name, default in of.items() if name in GRAMMAR and default != GRAMMAR[name]}
        for call, of in every.items()
    }
    stated = {call: {name: default for name, (default, _) in of.items()} for call, of in DEVIATING.items()}
    assert {call: of for call, of in found.items() if of} == stated


def test_the_order_is_the_same() -> None:
    """That of a job, class by class: the command shows what all jobs have last."""
    wrong = [name for name, call in CALLS.items() if not in_order([*call])]
    classes = {of for job in JOBS.values() for of in job.__mro__}
    wrong += [of.__name__ for of in classes if not in_order([*inspect.get_annotations(of)])]
    assert wrong == ["calibration_windows"]  # whose tokenizer stands beside the text


def test_options_have_the_names_of_fields() -> None:
    for job in JOBS.values():
        for name, option in options_of(job).items():
            assert option.flag == FLAGS.get(name, "--" + name.replace("_", "-"))
