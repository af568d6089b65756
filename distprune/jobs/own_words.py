"""The windows that a job calibrates with: of a text, written by its model, or both.

What the model wrote lies beside what else an unfinished job has done: a job that goes on has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.calibration.data import check_fit, load_samples, token_digest
from distprune.calibration.own_words import SELF, own_words, texts_of
from distprune.collectives.agree import agree, together
from distprune.jobs.files import JobFiles
from distprune.jobs.run import Run, clock
from distprune.jobs.words_file import about_tokenizer, read_words, write_words

OWN_WORDS = 96  # windows beside those of a text, of a method that has them by default
_WORDS = "own_words"  # a record, and the file of the windows
PROMPT = 32  # tokens of the text that a window continues, or a quarter of a short window


@dataclass(frozen=True)
class WindowCounts:
    """How many windows are of the ``text``, written ``continuing`` pieces of it, or the model's ``own`` altogether."""

    text: int = 0
    continuing: int = 0
    own: int = 0

    @property
    def total(self) -> int:
        return self.text + self.continuing + self.own


def counts_of(
    calibration: str, num_samples: int | None, num_own: int | None, *, num_text: int, num_in_file: int | None
) -> WindowCounts:
    """Return how many windows a job has: ``num_samples`` of the text, or without a text in all. Local.

    ``num_own``: what the model writes beside a text; ``None``: 96 windows. ``num_text``: the windows of the text that
    are there. ``num_in_file``: those that were written before; ``None``: none were.

    Raises:
        ValueError: more are wanted than there are, or it is not said how many.
    """
    has_text = calibration != SELF
    num_text = num_text if has_text else 0
    wanted = num_own if has_text else num_samples
    if num_in_file is not None:
        if wanted is not None and wanted > num_in_file:
            raise ValueError(f"{wanted} own windows are wanted, and the file holds {num_in_file}")
        return WindowCounts(text=num_text, own=num_in_file if wanted is None else wanted)
    if not has_text:
        if wanted is None:
            raise ValueError("a model has no end of windows to write; say how many: samples=..., such as 128")
        return WindowCounts(own=wanted)
    wanted = OWN_WORDS if wanted is None else wanted
    return WindowCounts(num_text, wanted // 2, wanted - wanted // 2)


@dataclass(frozen=True)
class Windows:
    """The windows that are there before the model writes: of the ``text`` (n, length), and of a file of ``own`` ones.

    ``prompts`` are continued; as many more windows are written as ``counts`` says.
    """

    counts: WindowCounts
    length: int
    text: torch.Tensor | None
    prompts: torch.Tensor | None
    own: torch.Tensor | None

    def stand_in(self) -> torch.Tensor:
        """Return token ids of the shape that the samples will have. Local."""
        return torch.zeros(self.counts.total, self.length, dtype=torch.int64, device="cpu")

    def samples(self, run: Run, model: nn.Module, tokenizer: Any, seed: int, files: JobFiles) -> torch.Tensor:
        """Return all windows, (counts.total, length), the kinds evenly mixed; have ``model`` write what is missing.

        Every rank must call it. Communicates and raises as :func:`kept_words`; one round of 64 bytes more.
        """
        kinds = [] if self.text is None else [self.text]
        num_continuing, num_own = self.counts.continuing, self.counts.own
        if self.own is not None:
            kinds.append(self.own)
        elif num_continuing + num_own:
            write = partial(write_own_words, run, model, tokenizer, self.prompts, num_own, self.length, seed)
            written = kept_words(run, files, write)
            kinds += [part for part in (written[:num_continuing], written[num_continuing:]) if len(part)]
        with together(run.comm):
            return mixed(kinds)


def load_windows(
    run: Run,
    model: nn.Module,
    tokenizer: Any,
    *,
    calibration: str,
    words_file: str | None,
    num_samples: int | None,
    num_own: int | None,
    length: int,
    seed: int,
) -> Windows:
    """Return the windows that a job asks for, and note what was read. Every rank must call it: eight rounds at most.

    Raises:
        ValueError, OSError: on every rank: as :func:`load_samples` and :func:`read_words`, or too few windows.
    """
    text = pieces = prompts = own = None
    load = partial(load_samples, tokenizer, calibration, model, seed=seed, group=run.comm)
    if calibration != SELF:
        text = load(num_samples=num_samples, sequence_length=length)
    with together(run.comm):
        if words_file is not None:
            own = _fitting(words_file, model, tokenizer, length)
        num_text, num_in_file = (None if of is None else len(of) for of in (text, own))
        counts = counts_of(calibration, num_samples, num_own, num_text=num_text or 0, num_in_file=num_in_file)
        own = None if own is None else own[: counts.own]
    if text is not None and counts.continuing:
        num_tokens = min(PROMPT, max(length // 4, 1))
        num_there = len(text) * (length // num_tokens)  # at least
        pieces = load(num_samples=min(counts.continuing, num_there), sequence_length=num_tokens)
    with together(run.comm):
        if pieces is not None:
            prompts = pieces[torch.arange(counts.continuing, device="cpu") % len(pieces)]
        read = {"calibration tokens": text, "own words of the file": own, "tokens to continue": prompts}
        run.read |= {what: token_digest(of) for what, of in read.items() if of is not None}
    agree(run.comm, {"own words": run.read.get("own words of the file")})
    return Windows(counts, length, text, prompts, own)


def _fitting(path: str, model: nn.Module, tokenizer: Any, length: int) -> torch.Tensor:
    """Return the windows of a file, cut to ``length``. Local; raises as :func:`read_words`, or as they do not fit."""
    own, about = read_words(Path(path))
    if not about.items() >= about_tokenizer(tokenizer).items():
        raise ValueError(
            f"{path} was written with another tokenizer than the model's, by {about.get('model')}: its token ids mean "
            "other text here; have the model write its own, with distprune sample"
        )
    if own.shape[1] < length:
        raise ValueError(f"{path} holds windows of {own.shape[1]} tokens, and {length} are wanted")
    check_fit(own[:, :length], model)
    return own[:, :length].contiguous()


def write_own_words(
    run: Run,
    model: nn.Module,
    tokenizer: Any,
    prompts: torch.Tensor | None,
    num_own: int,
    length: int,
    seed: int,
) -> torch.Tensor:
    """Have ``model`` write: what continues each of ``prompts``, and ``num_own`` windows of texts from one token each.

    Every rank must call it: as :func:`own_words`, which raises.
    """
    # What windows begin with, how many, a seed, and their texts: how many, and of how many tokens.
    kinds: list[tuple[torch.Tensor | None, int, int, tuple[int, int]]] = []
    if prompts is not None:
        kinds.append((prompts, len(prompts), ~seed, (len(prompts), length)))  # other draws than the others'
    if num_own:
        kinds.append((None, num_own, seed, texts_of(num_own, length)))
    to_write = [texts * (of_text - (1 if given is None else given.shape[1])) for given, *_, (texts, of_text) in kinds]
    parts, done = list[torch.Tensor](), 0
    with clock(run.seconds, "write words"), run.reporter.stage("writing own words", "tokens") as progress:
        for (given, num, own_seed, _), tokens in zip(kinds, to_write, strict=True):
            tell = partial(_tell, progress, done, sum(to_write))
            parts.append(
                own_words(
                    model, num, length, prompts=given, seed=own_seed, tokenizer=tokenizer, group=run.comm, progress=tell
                )
            )
            done += tokens
    with together(run.comm):
        return torch.cat(parts)


def _tell(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def kept_words(run: Run, files: JobFiles, write: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the windows that an unfinished job has kept, or what ``write`` returns, and keep that.

    Every rank must call it: what ``write`` communicates, and a round of 64 bytes.

    Raises:
        OSError: on every rank: the disk is full or not writable.
        ValueError: on every rank: the file of what was kept is damaged.
    """
    path = files.folder / f"{_WORDS}.tokens"
    if files.known(_WORDS) is not None:
        with together(run.comm):
            return read_words(path)[0]
    words = write()
    with together(run.comm):
        if run.comm.rank == 0:
            write_words(path, words, {}, sync=files.sync)
        files.record(_WORDS, len(words))
    return words


def mixed(kinds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the windows of all ``kinds``, so mixed that consecutive ones hold all kinds in proportion. Local."""
    order = sorted(((i + 0.5) / len(of), kind, i) for kind, of in enumerate(kinds) for i in range(len(of)))
    return torch.stack([kinds[kind][i] for _, kind, i in order])
