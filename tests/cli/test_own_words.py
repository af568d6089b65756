"""Without a text the model writes one: which options say so."""

from __future__ import annotations

from distprune.cli.commands import JobCommand
from distprune.jobs import FinetuneJob, OneShotJob, PlanJob, SampleJob, ShrinkJob
from distprune.oneshot.recipe import OneShotMethod
from tests.cli.test_main import asked


def test_the_method_says_that_the_model_writes() -> None:
    method: OneShotMethod
    for method in ("admm", "sparsegpt", "wanda"):
        (request,) = asked(f"prune m --output o --sparsity 0.5 --method {method} --samples 8")
        assert request.job == OneShotJob(
            model="m", output="o", method=method, sparsity=0.5, calibration="self", samples=8
        )
    (request,) = asked("prune m --output o --sparsity 0.5 --plan --method admm")
    assert request.job == PlanJob(model="m", output="o", sparsity=0.5)
    assert asked("shrink m --output o --mlp 0.5") == [
        JobCommand(ShrinkJob(model="m", output="o", calibration="self", mlp=0.5), "auto", 600)
    ]
    (request,) = asked("finetune m --output o --teacher t --steps 3")
    assert request.job == FinetuneJob(model="m", output="o", data="self", teacher="t", steps=3)
    (request,) = asked("prune m --output o --sparsity 0.5 --calibration t --own-words 2 --own-words-file w")
    assert request.job == OneShotJob(
        model="m", output="o", sparsity=0.5, calibration="t", own_words=2, own_words_file="w"
    )
    (request,) = asked("sample m --output o --samples 3 --sequence-length 9 --seed 5 --temperature 0.5 --top-k 7")
    assert request.job == SampleJob(
        model="m", output="o", samples=3, sequence_length=9, seed=5, temperature=0.5, top_k=7
    )
