"""What the texts begin with that a model writes: it decides what they are about.

SmolLM2-135M, 2:4, seed 0, channels dealt out by their sums alone, times dense on speeches, documentation and code:
1.480, 2.355, 2.719 where half of the windows continue the calibration text and half begin with random tokens; 1.531,
1.946, 1.883 where a third each continue it, begin as documents of many kinds do, and are chats. What the default comes
to is in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from distprune.calibration.text import behind, first_token, generator_of, ids_of
from distprune.models.decoder_blocks import text_config

_TEXT, _CHAT = 64, 256  # tokens of a text and of a chat, of which long windows hold many
_NUM_TEXTS, _LEAST = 4, 32  # texts of a short window; tokens of each, or there are fewer

# fmt: off
BEGINNINGS = (
    "def ", "import ", "class ", "#include <", "function ", "public class ", "SELECT ", "<html>\n", "#!/bin/bash\n",
    "```python\n", "package main\n", "// ", '"""', '{\n  "', "<?php\n", "$ ", "Usage: ", "Parameters:\n", "Returns ",
    "Note that ", "Example:\n", "Section 1", "Installation\n", "The following ", "See also ", "Abstract. ", "1. ", "- ",
    "| ", "Chapter ", "Theorem. ", "Let x ", "Dear ", "Q: ", "How to ", "Once upon a time", "Ingredients:\n",
    "Breaking news: ", "In 19", "He said", "\u201c", "To: ", "Title: ", "Abstract: ", "The ", "A ", "My ", "We ",
)
# fmt: on


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens ``model`` knows. Local.

    Raises:
        NotImplementedError: its configuration does not say.
    """
    size = getattr(text_config(model), "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise NotImplementedError(f"{type(model).__name__} says no vocab_size in its configuration; give a text")
    return size


@dataclass(frozen=True)
class Texts:
    """Texts that are written together: from ``prompts`` (texts, tokens) to ``length`` tokens; they fill ``windows``.

    Behind a prompt that is shorter than others stands -1.
    """

    prompts: torch.Tensor
    length: int
    windows: list[int]

    @property
    def num_steps(self) -> int:
        """How many tokens are written behind the shortest prompt."""
        return self.length - int((self.prompts >= 0).all(dim=0).sum())


def texts_of(
    model: nn.Module,
    tokenizer: Any,
    prompts: torch.Tensor | None,
    lines: Sequence[str] | None,
    samples: int,
    length: int,
    seed: int,
) -> list[Texts]:
    """Return the texts of ``samples`` windows of ``length`` tokens: the first continue ``prompts``. Local.

    The others are in turn of the kinds that :func:`distprune.own_words` names, each text behind the token that the
    tokenizer begins texts with, if any; beside prompts none begins with random tokens. Documents begin with ``lines``,
    where there are any. Without a chat template, room for one, or all its tokens in the model's vocabulary, beginnings
    take the place of chats, and without a tokenizer random tokens that of all. Texts that share a window may be a few
    tokens too long for it.

    Raises:
        ValueError: ``lines`` are none, or stand there without a tokenizer; a line is empty, or fills a whole text.
    """
    if lines is not None and (tokenizer is None or not lines or isinstance(lines, str)):
        raise ValueError(f"beginnings={lines!r} must be a list of texts, one at least, and needs a tokenizer")
    num_given = 0 if prompts is None else len(prompts)
    texts = [] if prompts is None else [Texts(prompts.cpu(), length, list(range(num_given)))]
    first = first_token(tokenizer, length - 1)  # there must be room behind it and another one
    opening, begun = chat_opening(tokenizer), [] if tokenizer is None else beginnings(tokenizer, lines)
    if opening[: len(first)] != first:  # many templates say it themselves
        opening = first + opening
    vocabulary = vocabulary_of(model)
    begun = [first + ids for ids in begun if lines is not None or ids[0] < vocabulary]
    size = max([_TEXT, *(2 * len(ids) for ids in begun)])  # of a text in a long window
    num_texts, num_chats = max(1, min(_NUM_TEXTS, length // _LEAST), length // size), max(1, length // _CHAT)
    text_length, chat_length = -(-length // num_texts), -(-length // num_chats)
    can_chat = len(first) < len(opening) < chat_length and max(opening) < vocabulary
    kinds = ["tokens"] if prompts is None or not begun else []
    if begun:
        kinds += ["beginnings", *kinds, "chats" if can_chat else "beginnings"]
    generator = generator_of(seed)
    for line, ids in zip(lines, begun, strict=True) if lines else ():
        if not len(first) < len(ids) < text_length:
            raise ValueError(f"the beginning {line[:40]!r} has {len(ids)} tokens, where a text has {text_length}")
    for kind in dict.fromkeys(kinds[: samples - num_given]):
        windows = [i for i in range(num_given, samples) if kinds[(i - num_given) % len(kinds)] == kind]
        num = len(windows) * num_texts
        if kind == "chats":
            chats = torch.tensor([opening] * (len(windows) * num_chats), dtype=torch.int64, device="cpu")
            texts.append(Texts(chats, chat_length, windows))
        elif kind == "tokens":
            tokens = behind(first, random_tokens(model, num, generator, tokenizer))
            texts.append(Texts(tokens, text_length, windows))
        else:
            starts = pad_sequence([torch.tensor(ids, dtype=torch.int64, device="cpu") for ids in begun], True, -1)
            order = torch.randperm(num, generator=generator, device="cpu") % len(starts)
            texts.append(Texts(starts[order], text_length, windows))
    return texts


def random_tokens(model: Any, num: int, generator: torch.Generator, tokenizer: Any) -> torch.Tensor:
    """Return random tokens (num, 1) that are there and not special. Local.

    Raises:
        ValueError: there is none.
    """
    allowed = set(range(vocabulary_of(model)))
    for config in (model.config, text_config(model), model.generation_config):
        for name, special in vars(config).items():
            if name.endswith("_token_id"):
                allowed -= {*special} if isinstance(special, list) else {special}
    if tokenizer is not None:
        allowed = (allowed & {*tokenizer.get_vocab().values()}) - {*tokenizer.all_special_ids}
    if not allowed:
        raise ValueError(f"the vocabulary of {type(model).__name__} has no token that is not special")
    ids = torch.tensor(sorted(allowed), dtype=torch.int64, device="cpu")
    return ids[torch.randint(len(ids), (num, 1), generator=generator, device="cpu")]


def beginnings(tokenizer: Any, lines: Sequence[str] | None) -> list[list[int]]:
    """Return the tokens of ``lines``, or the first of each of :data:`BEGINNINGS` that the tokenizer knows. Local."""
    texts = [ids_of(tokenizer, line.rstrip(" ")) for line in lines or BEGINNINGS]
    if lines is not None:
        return texts
    firsts = [ids[:1] for ids in texts if ids and ids[0] != tokenizer.unk_token_id]
    return [ids for ids in firsts if "\ufffd" not in tokenizer.decode(ids)]  # a part of a character


def chat_opening(tokenizer: Any) -> list[int]:
    """Return the tokens with which a user's turn begins in the tokenizer's chat template; it may have none. Local."""
    said = "distprune"
    try:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
    except Exception:  # it has no template, or one for more than a user
        return []
    opening, _, _ = chat.partition(said)
    role = opening.rfind("user")
    starts = [opening.rfind(special, 0, role) for special in tokenizer.all_special_tokens] if role >= 0 else []
    return ids_of(tokenizer, opening[max([0, *starts]) :])
