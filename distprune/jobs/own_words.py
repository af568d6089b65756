"""The windows that a job calibrates with, of a text or written by its model; what it is asked for; their file.

What the model wrote lies beside what else an unfinished job has done: a job that goes on has the same. The file is
safetensors, with what the windows were written with in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from distprune.calibration.data import check_fit, token_digest
from distprune.calibration.own_words import SELF, own_words
from distprune.calibration.text import TextFile
from distprune.checkpoint.disk import write_whole
from distprune.checkpoint.hf_directory import new_digest
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.weight_file import open_weights
from distprune.collectives.agree import together
from distprune.jobs.options import CALIBRATION, METHOD, MOST, RUNNING, Job, ask, asked
from distprune.jobs.run import JobFiles, Run
from distprune.oneshot.recipe import TargetsOf
from distprune.version import __version__

OWN_WORDS = 96  # windows beside those of a text, of a method that has them by default
_WORDS = "own_words"  # a record, and the file of the windows
_TOKENS = "token_ids"  # in the file
_FORMAT = {"format": "distprune own words"}
_OF_TEXT = 4 / 7  # of all windows: those of the text, and own ones that continue it, which are half of these at most
_PROMPT = 32  # tokens of the text that a window continues, or a quarter of a short window


def ask_words(panel: str) -> Any:
    """Return the field for windows that the model writes, how many, or that are in a file."""
    return ask(
        default=None,
        parse=lambda text: int(text) if text.isdecimal() else text,
        metavar="N|FILE",
        least=0,
        most=MOST,
        is_file=True,
        panel=panel,
    )


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

    ``num_own``: what the model writes beside a text, up to half of it continuing that, 96 windows where it is ``None``;
    or without a text in the place of ``num_samples``. ``num_text``: the windows of the text that are there.
    ``num_in_file``: those that were written before; ``None``: none were.

    Raises:
        ValueError: it is not said how many.
    """
    has_text = calibration != SELF
    if num_in_file is not None:
        return WindowCounts(text=num_text if has_text else 0, own=num_in_file)
    if has_text:
        num_own = OWN_WORDS if num_own is None else num_own
        wanted = round(_OF_TEXT * (num_text + num_own)) - num_text
        continuing = min(max(wanted, 0), num_own // 2)
        return WindowCounts(num_text, continuing, num_own - continuing)
    if not (num := num_own or num_samples):
        raise ValueError("a model has no end of windows to write; say how many (--samples), such as 128")
    return WindowCounts(own=num)


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

    def samples(self, run: Run, model: nn.Module, files: JobFiles) -> torch.Tensor:
        """Return all windows, (counts.total, length), those of the text and others evenly mixed.

        What is missing ``model`` writes, or has written before: it is kept in ``files``. Every rank must call it: what
        :func:`own_words` communicates, and three rounds of 64 bytes.

        Raises:
            OSError: on every rank: the disk is full or not writable.
            ValueError: on every rank: the file of what was kept is damaged; or as :func:`own_words` raises.
        """
        own, path = self.own, files.folder / f"{_WORDS}.tokens"
        num_own, num_continuing = self.counts.total - self.counts.text, self.counts.continuing
        if own is None and files.known(_WORDS) is not None:
            with together(run.comm):
                own = read_words(path)[0]
        elif own is None and num_own:
            with run.stage("write words", "writing own words", "tokens") as progress:
                how = {"tokenizer": run.tokenizer, "prompts": self.prompts, "seed": run.job.seed}
                own = own_words(model, num_own, self.length, **how, group=run.comm, progress=progress)
            with together(run.comm):
                if run.comm.rank == 0:
                    write_whole(path, words_content(own, {}), sync=files.sync)
                files.record(_WORDS, len(own))
        with together(run.comm):
            kinds = [self.text] if own is None else [self.text, own[:num_continuing], own[num_continuing:]]
            return mixed([windows for windows in kinds if windows is not None and len(windows)])


def load_windows(
    run: Run,
    calibration: str,
    num_samples: int | None,
    words: int | str | None,
    length: int,
) -> Windows:
    """Return the windows that a job asks for, and note what was read. Every rank must call it: a round of 64 bytes.

    Raises:
        ValueError, OSError: on every rank: as :func:`calibration_windows` and :func:`read_words`, or too few windows.
    """
    text = prompts = own = None
    seed = run.job.seed
    with together(run.comm) as read:
        check_fit(torch.zeros((1, 1), dtype=torch.int64, device="cpu"), run, length)  # before there are any
        file = TextFile(run.tokenizer, Path(calibration))
        if isinstance(words, str):
            own = _fitting(words, run, length)
        if calibration != SELF:
            text = file.draw(num_samples, length, seed)
            check_fit(text, run)
        num_text, num_in_file = 0 if text is None else len(text), None if own is None else len(own)
        num_own = None if isinstance(words, str) else words
        counts = counts_of(calibration, num_samples, num_own, num_text=num_text, num_in_file=num_in_file)
        if counts.continuing:
            num_tokens = min(_PROMPT, max(length // 4, 1))
            num_there = num_text * (length // num_tokens)  # at least
            pieces = file.draw(min(counts.continuing, num_there), num_tokens, seed)
            prompts = pieces[torch.arange(counts.continuing, device="cpu") % len(pieces)]
        tokens = {"calibration tokens": text, "own words of the file": own, "tokens to continue": prompts}
        read |= {what: token_digest(windows) for what, windows in tokens.items() if windows is not None}
        run.read |= read
    return Windows(counts, length, text, prompts, own)


def parse_samples(text: str) -> int | None:
    """Return how many windows are meant; ``None``: all."""
    return None if text == "all" else int(text)


@asked
class CalibratedJob(Job):
    """What a job that walks through the blocks with windows of tokens is asked for beside that.

    Args:
        calibration: Text or JSON-lines file. Work block by block, with the inputs this text gives each layer. self: the
            model writes the text.
        samples: Windows of the text, drawn by --seed; without a text, windows that the model writes.
        sequence_length: Tokens in each.
        own_words: Windows that the model writes beside those of the text: half continue pieces of the text, fewer with
            much text, the others begin as documents of many kinds do, and as chats (96 with admm and shrink, else
            none). Or a file
            that distprune sample has written: all windows in it.
        targets: Aim at each layer's own output, or at the dense model's (the default of admm and of obs).
        target_share: How much of the way to the dense model's output (half of it).
        offload: Keep activations on the CPU between blocks.
        batch_tokens: Tokens that run together, or one window (8192 to 65536; fewer on the CPU).
    """

    calibration: str = ask(default=SELF, is_file=True, metavar="PATH|self", panel=CALIBRATION)
    samples: int | None = ask(default=128, parse=parse_samples, metavar="N|all", least=1, most=MOST, panel=CALIBRATION)
    sequence_length: int = ask(default=2048, least=1, most=MOST, panel=CALIBRATION)
    own_words: int | str | None = ask_words(CALIBRATION)
    targets: TargetsOf | None = ask(default=None, panel=METHOD)
    target_share: float | None = ask(default=None, above=0, most=1, panel=METHOD)
    offload: bool = ask(default=False, decides=False, panel=RUNNING)
    batch_tokens: int | None = ask(default=None, least=1, most=MOST, decides=False, panel=RUNNING)

    @override
    def check_asked(self) -> None:
        super().check_asked()
        if self.calibration == SELF and isinstance(self.own_words, int):
            raise ValueError(
                f"own_words={self.own_words} (--own-words) is beside a text; with calibration={SELF!r} the model "
                "writes all windows, and samples (--samples) says how many"
            )
        words = self.own_words_or_default()
        if not isinstance(words, str):
            counts = counts_of(self.calibration, self.samples, words, num_text=self.samples or 1, num_in_file=None)
            if self.sequence_length < 2 and counts.total > counts.text:
                raise ValueError(
                    "sequence_length=1 (--sequence-length 1) leaves nothing to write; take windows of a text, and "
                    "own_words=0 (--own-words 0)"
                )

    @override
    def check_given(self, names: Collection[str]) -> None:
        if "samples" in names and self.calibration == SELF and isinstance(self.own_words, str):
            raise ValueError(
                f"--samples goes with a --calibration text here: --own-words {self.own_words} takes all windows"
            )

    def own_words_or_default(self) -> int | str | None:
        """Return what is to stand in ``own_words``; ``None``: as :func:`counts_of` says. Local."""
        return self.own_words

    def windows(self, run: Run) -> Windows:
        """Return what is there of the windows, and note what was read. Every rank: as :func:`load_windows`."""
        return load_windows(
            run,
            calibration=self.calibration,
            num_samples=self.samples,
            words=self.own_words_or_default(),
            length=self.sequence_length,
        )


def _fitting(path: str, run: Run, length: int) -> torch.Tensor:
    """Return the windows of a file, cut to ``length``. Local; raises as :func:`read_words`, or as they do not fit."""
    own, about = read_words(Path(path))
    if not about.items() >= about_tokenizer(run.tokenizer).items():
        raise ValueError(
            f"{path} was written with another tokenizer than the model's, by {about.get('model')}: its token ids mean "
            "other text here; have the model write its own, with distprune sample"
        )
    if own.shape[1] < length:
        raise ValueError(
            f"{path} holds windows of {own.shape[1]} tokens, and {length} are wanted: lower sequence_length "
            "(--sequence-length)"
        )
    check_fit(own[:, :length], run)
    return own[:, :length].contiguous()


def mixed(kinds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the windows of all ``kinds``, so mixed that consecutive ones hold all kinds in proportion. Local."""
    order = sorted(
        ((i + 0.5) / len(windows), kind, i) for kind, windows in enumerate(kinds) for i in range(len(windows))
    )
    return torch.stack([kinds[kind][i] for _, kind, i in order])


def about_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return what the metadata says of the tokenizer: token ids mean something only to the same. Local."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return {"tokenizer": str(new_digest(vocabulary.encode()).hexdigest())}


def words_content(token_ids: torch.Tensor, about: Mapping[str, object]) -> bytes:
    """Return what a file of ``token_ids`` (windows, tokens) holds; ``about`` goes into its metadata, with versions."""
    save = import_extra("safetensors.torch", "hf").save
    versions = {"distprune": str(__version__), **{name: version(name) for name in ("torch", "transformers")}}
    metadata = {**_FORMAT, **{key: str(value) for key, value in about.items()}, **versions}
    content: bytes = save({_TOKENS: token_ids.to(torch.int32).contiguous()}, metadata)
    return content


def read_words(path: Path) -> tuple[torch.Tensor, dict[str, str]]:
    """Return the windows in the file ``path``, int64, and its metadata. Nothing is unpickled. Local.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not of :func:`words_content`, or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of own words {path}")
    with open_weights(path) as file:
        metadata, names = dict(file.metadata() or {}), list(file.keys())
        token_ids = file.get_tensor(_TOKENS) if names == [_TOKENS] else None
    if token_ids is None or not metadata.items() >= _FORMAT.items():
        raise ValueError(f"{path} holds no windows of `distprune sample`")
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.ndim != 2 or not token_ids.numel():
        raise ValueError(f"{path} holds {token_ids.dtype} {tuple(token_ids.shape)}, not token ids by window")
    return token_ids.to(torch.int64), metadata
