"""What one-shot pruning makes of every family of causal language models in transformers, in tiny configurations.

python -m benchmarks.sweep_families --output benchmarks/results/families_DATE.md
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import transformers

from benchmarks.measure import heading, show, table
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.report import OneShotReport
from tests.families import FAMILIES, NOT_BUILT, REFUSED, family_model, tokens

COLUMNS = ("family", "outcome", "matrices pruned", "weights left dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    rows = [row(family) for family in FAMILIES]
    counts = Counter(outcome for _, outcome, _, _ in rows)
    text = heading("Families of causal language models", "python -m benchmarks.sweep_families")
    text += (
        f"\nEvery family that AutoModelForCausalLM of transformers {version('transformers')} knows, in a tiny\n"
        "configuration of three blocks (`tests/families.py`), by Wanda to 2:4 and by ADMM to 50 % of each row.\n"
        "Matrices are counted over all blocks, one for each expert; where ADMM prunes another number, its own comes\n"
        "second. After them come models that read images or speech, too, or have an encoder, as far as generic sizes\n"
        "build them. What stays dense is named in a call's report, with the reason: here for 2:4. A refused model\n"
        "is as it was before.\n\n"
        f"{', '.join(f'{number} {outcome}' for outcome, number in counts.items())};"
        f" {time.perf_counter() - started:.0f} seconds.\n\n"
    )
    text += table(COLUMNS, rows) + "\n"
    show(text, arguments.output)


def row(family: str) -> tuple[str, str, str, str]:
    """Return what became of a tiny model of ``family``."""
    if family in NOT_BUILT:
        return family, "not built", "", NOT_BUILT[family]
    try:
        two_four = prune_blocks(family_model(family), tokens(), method="wanda", pattern="2:4")
        by_row = prune_blocks(family_model(family), tokens(), method="admm", pattern="row", sparsity=0.5)
    except (ValueError, NotImplementedError) as error:
        if family not in REFUSED:
            raise
        return family, "refused", "", str(error)
    numbers = list(dict.fromkeys([num_pruned(two_four), num_pruned(by_row)]))
    return family, "pruned", ", ".join(map(str, numbers)), left_dense(two_four)


def num_pruned(report: OneShotReport) -> int:
    """Return the number of matrices."""
    return sum(len(block.layers) for block in report.blocks)


def left_dense(report: OneShotReport) -> str:
    """Return reasons, each with the number of weights."""
    reasons = [reason for block in report.blocks for reason in block.dense.values()]
    counts = Counter(re.sub("that of '.*'", "an earlier block's", reason) for reason in reasons)
    parts = [f"{reason}: {number}" for reason, number in counts.items()]
    if report.other_blocks:
        parts.append(f"the blocks of {', '.join(report.other_blocks)}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
