"""Windows of tokens that a model writes itself: calibration where there is no text, or text of one kind only.

Nouns: a *text* begins with a *prompt*, and the model continues it. A *window* holds one text, or several, one behind
the other: so few windows are about many things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn

from distprune.calibration.data import check_fit, device_of, token_digest
from distprune.calibration.openings import texts_of, vocabulary_of
from distprune.calibration.recorded_words import can_record, write_recorded
from distprune.calibration.sample_group import find_sample_group
from distprune.calibration.token_ids import TokenIds
from distprune.collectives.agree import check_facts, same_everywhere, sum_together, together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.models.decoder_blocks import bare_model, is_encoder_decoder, largest_said, num_bytes, text_config
from distprune.models.evaluating import evaluating, keeping_weights
from distprune.models.find_shards import check_model
from distprune.models.runnable import check_logits, check_runs_on_tokens
from distprune.shards.fsdp2_forward import kept_gathered, reset_forward, take_roots
from distprune.shards.in_step import in_step
from distprune.shards.layouts import find_flat_parts

_CACHE_MEMORY = 4 << 30  # bytes of keys and values at a time, on one rank
TOP_K = 1000
SELF = "self"  # samples that the model writes
_NUM_WINDOWS, _LENGTH = 128, 2048  # of those
_UNKNOWN_WIDTH, _UNKNOWN_LAYERS = 8192, 64  # of a model whose config does not say its sizes: large
_LOGIT_BYTES = 24  # an element: the model's, and in float32 those of transformers

Progress = Callable[[int, int], None] | None


def samples_of(comm: Communicator, model: nn.Module, samples: TokenIds | str) -> TokenIds:
    """Return ``samples``, or if they are ``"self"``, 128 own windows of 2,048 tokens, or of all the model's positions.

    Of token ids nothing is communicated, and nothing checked. Else 2 rounds of 64 bytes, and as :func:`own_words`,
    which raises.

    Raises:
        ValueError: on every rank: another text, or a rank where ``samples`` are token ids.
    """
    if not isinstance(samples, str):
        return samples
    facts = {"samples": samples}
    if not same_everywhere(comm, facts)[0]:  # others are where they agree on a tensor
        check_facts(comm, facts)
    with together(comm):
        check_model(model)
        if samples != SELF:
            way_out = "distprune.calibration_windows(text, tokenizer) makes token ids of text"
            raise ValueError(f"samples={samples[:40]!r} is neither token ids nor {SELF!r}; {way_out}")
        positions = getattr(text_config(model), "max_position_embeddings", None)
        length = min(_LENGTH, positions) if isinstance(positions, int) and positions > 0 else _LENGTH
    return own_words(model, _NUM_WINDOWS, length, group=comm)


def own_words(
    model: nn.Module,
    samples: int = _NUM_WINDOWS,
    sequence_length: int = _LENGTH,
    *,
    tokenizer: Any = None,
    prompts: torch.Tensor | None = None,
    beginnings: Sequence[str] | None = None,
    temperature: float = 1.0,
    top_k: int = TOP_K,
    seed: int = 0,
    group: Group = None,
    cache_memory: int | None = None,
    progress: Progress = None,
) -> torch.Tensor:
    """Return windows that ``model`` has written, (samples, sequence_length) int64, on the CPU.

    >>> own_words(llama, 2, 6).shape
    torch.Size([2, 6])

    By the ``generate`` of transformers. Windows that continue no ``prompts`` are of several kinds (see
    ``calibration/openings.py``): every other one holds texts that begin with random tokens; the rest hold in turn
    texts that begin as documents of many kinds do and, where the tokenizer has a chat template, chats, which begin as a
    user's turn. Texts have 64 tokens or a few more, or twice those of the longest of ``beginnings``, and chats 256: a
    long window is about many things. Short windows hold up to four texts, of 32 tokens or more, or a chat.
    The end-of-sequence token does not end a text: documents follow each other. To be given to
    :func:`distprune.prune_blocks` and others as ``samples``.

    Args:
        model: a causal language model of transformers; layouts as for :func:`distprune.prune_blocks`. It is run in
            evaluation mode and left as it was.
        samples, sequence_length: how many windows, and of how many tokens.
        tokenizer: of transformers. Where it begins texts with a token, these do. Without it all begin with random
            tokens of the vocabulary.
        prompts: what the first windows continue, (at most ``samples``, at least 1) int64: pieces of a text. Then no
            other window begins with random tokens.
        beginnings: what documents begin with, each with one of these, whole but for spaces at its end. By default some
            begin as code does, others as manuals, letters, stories.
        temperature, top_k: tokens are drawn from the ``top_k`` likeliest by the softmax of logits / temperature.
        seed: of the draws, which differ from rank to rank: other numbers of ranks write other texts.
        cache_memory: bytes of keys and values, and logits, on one rank: as many texts are written at a time. By default
            4 GiB, or for one rank an eighth of its GPU's memory, if that is more. Weights that FSDP2 has sharded are
            gathered once if they all fit into as many bytes more; else block by block, for one token of all texts at a
            time.
        progress: called with (tokens written on all ranks, all tokens to write).

    Texts are dealt out to the sample groups. Every rank of ``group`` must call it, with equal arguments. Rounds
    beyond those of the model: 1 of 64 bytes, those of ``find_sample_group``, one of all windows, and for each token
    of a text those of ``in_step``.

    Raises:
        ValueError, TypeError: on every rank: arguments out of range or unequal on two ranks, a window longer than the
            model has positions for, or logits that are no numbers.
        NotImplementedError: on every rank: encoder-decoders, models that do not generate or have no vocabulary, FSDP1,
            or logits that are cut.
        RuntimeError: on every rank: a forward that changes the model's own weights.
        Exception: on every rank: what a forward, or ``progress``, raised on one; but for those of which
            ``in_step`` says that the others cannot be told.
    """
    comm, bare = communicator(group), bare_model(model)
    with together(comm) as facts:
        check_model(model)
        numbers = {"samples": samples, "sequence_length": sequence_length, "top_k": top_k, "seed": seed}
        device = device_of(bare)
        is_alone = comm.size == 1 and device.type == "cuda"
        of_device = torch.cuda.get_device_properties(device).total_memory if is_alone else 0
        numbers["cache_memory"] = room = max(_CACHE_MEMORY, of_device // 8) if cache_memory is None else cache_memory
        _check(bare, numbers, temperature, prompts)
        check_runs_on_tokens(bare)
        if prompts is not None:
            check_fit(prompts, bare, sequence_length)
        all_texts = texts_of(bare, tokenizer, prompts, beginnings, samples, sequence_length, seed)
        for texts in all_texts:
            check_fit(texts.prompts.clamp(0), bare, sequence_length)
        reset_forward(bare)
        digests = [token_digest(texts.prompts) for texts in all_texts]
        facts |= {"asked": [numbers, temperature], "prompts": digests, "progress": progress is not None}
        windows = torch.zeros(samples, sequence_length, dtype=torch.int64, device="cpu")
        is_gathered = num_bytes(bare) <= room
        num_done, total = 0, sum(len(texts.prompts) * texts.num_steps for texts in all_texts)
    sample_group = find_sample_group(comm, bare)
    num_groups, number = sample_group.num_groups, sample_group.number

    def tell(num_done: int, num_texts: int, step: int) -> None:
        if progress is not None:
            progress(num_done + num_texts * step, total)

    take_roots(bare)
    with (
        kept_gathered(bare) if is_gathered else nullcontext(),
        in_step(comm, bare, layers_communicate=sample_group.size > 1, is_gathered=is_gathered) as run,
        _generating(bare, temperature, top_k, _seed_of(seed, number), records=comm.size == 1) as generate,
    ):
        for texts in all_texts:
            num_texts = len(texts.prompts)
            written = torch.zeros(num_texts, texts.length, dtype=torch.int64, device="cpu")
            # All groups write about as many texts at a time, and all ranks run as many forwards.
            num_rounds = -(-num_texts // (_batch_size(bare, texts.length, room) * num_groups))
            batches = torch.split(torch.arange(num_texts, device="cpu"), -(-num_texts // (num_rounds * num_groups)))
            for start in range(0, len(batches), num_groups):
                at_once = batches[start : start + num_groups]
                num_at_once = sum(map(len, at_once))
                batch = at_once[number] if number < len(at_once) else batches[-1][-1:]
                prompts_here = texts.prompts[batch].to(device)
                ids = run(generate, prompts_here, texts.length, texts.num_steps, partial(tell, num_done, num_at_once))
                if number < len(at_once) and sample_group.rank == 0:
                    written[batch] = ids.cpu()
                num_done += num_at_once * texts.num_steps
            windows[texts.windows] = written.view(len(texts.windows), -1)[:, :sequence_length]
    reset_forward(bare)
    return sum_together(comm, (samples, sequence_length), lambda words: words.copy_(windows))


def _check(bare: nn.Module, numbers: dict[str, int], temperature: float, prompts: torch.Tensor | None) -> None:
    """Raise what :func:`own_words` says of its arguments. Local."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, not {number!r}")
    if not isinstance(temperature, Real):
        raise TypeError(f"temperature must be a number, not {temperature!r}")
    samples, sequence_length, top_k = (numbers[name] for name in ("samples", "sequence_length", "top_k"))
    if samples < 1 or top_k < 1 or not 0 < temperature < float("inf"):
        raise ValueError(f"{samples=}, {top_k=} and {temperature=}: each must be above 0, and finite")
    if prompts is not None:
        if not isinstance(prompts, torch.Tensor) or prompts.dtype != torch.int64:
            raise TypeError(f"prompts must be a tensor of int64, not {getattr(prompts, 'dtype', type(prompts))}")
        if prompts.ndim != 2 or not 0 < len(prompts) <= samples or not prompts.shape[1]:
            raise ValueError(f"prompts must be (at most {samples}, 1 or more tokens), not {tuple(prompts.shape)}")
    num_given = 1 if prompts is None else prompts.shape[1]
    if sequence_length <= num_given:
        raise ValueError(f"{sequence_length=} leaves nothing to write behind {num_given} given tokens")
    name, can_generate = type(bare).__name__, getattr(bare, "can_generate", lambda: False)
    if is_encoder_decoder(bare):
        raise NotImplementedError(f"{name} is an encoder-decoder: it writes no windows of its own; give a text")
    if not can_generate() or getattr(bare, "generation_config", None) is None:
        raise NotImplementedError(f"{name} does not generate text as models of transformers do; give a text")
    if find_flat_parts(bare):
        raise NotImplementedError(
            "FSDP1 does not gather for generate; shard the model with fully_shard (FSDP2) instead"
        )
    vocabulary_of(bare)


@contextmanager
def _generating(
    model: nn.Module, temperature: float, top_k: int, seed: int, *, records: bool
) -> Iterator[Callable[[torch.Tensor, int, int, Callable[[int], None]], torch.Tensor]]:
    """Yield what continues prompts (texts, k) to texts of a length, by so many steps; leave ``model`` as it was.

    Nothing of the model's own generation settings acts (penalties, forced tokens, lengths, an end). Local.
    """
    anything: Any = model
    before, vocabulary = anything.generation_config, vocabulary_of(model)
    generator = torch.Generator(device_of(model)).manual_seed(seed)

    def generate(prompts: torch.Tensor, length: int, num_steps: int, tell: Callable[[int], None]) -> torch.Tensor:
        nonlocal records
        given, device = prompts[:, : length - num_steps], prompts.device
        are_numbers = torch.ones((), dtype=torch.bool, device=device)
        noise = torch.empty((len(prompts), min(top_k, vocabulary)), dtype=torch.float32, device=device)
        said = torch.full((len(prompts), 1), -1, dtype=torch.int64, device=device)  # by a longer prompt

        def shuffle(place: int) -> None:
            noise.exponential_(generator=generator)
            said.copy_(prompts[:, place, None]) if place < prompts.shape[1] else said.fill_(-1)

        def draw(logits: torch.Tensor) -> torch.Tensor:
            """Return a token for each text, (texts, 1): the largest of p / noise, as torch.multinomial does."""
            check_logits(logits, vocabulary)
            are_numbers.logical_and_(logits.amax().isfinite())  # NaN is the largest of all
            values, tokens = logits.nan_to_num().topk(noise.shape[1])
            shares = (values.float() / temperature).softmax(-1).div_(noise)
            return torch.where(said < 0, tokens.gather(1, shares.argmax(-1, keepdim=True)), said)

        def leave(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """Leave one token of each text: what is greedy then takes it."""
            shuffle(ids.shape[1])
            tokens = draw(logits)
            tell(ids.shape[1] + 1 - given.shape[1])
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens, 0.0)

        texts: torch.Tensor | None = None
        if records and can_record(model, num_steps):
            texts = write_recorded(model, given, length, shuffle, draw, tell)
            records = texts is not None
        if texts is None:
            texts = anything.generate(
                given,
                attention_mask=torch.ones_like(given),
                generation_config=type(before)(max_new_tokens=num_steps, do_sample=False, num_beams=1, use_cache=True),
                logits_processor=[leave],
                synced_gpus=False,  # all ranks take as many steps
            )
        if not are_numbers:
            raise ValueError("the model's logits are NaN or Inf where it writes own words")
        return texts

    with evaluating(model), keeping_weights(model):
        try:
            anything.generation_config = type(before)()  # what ``settings`` leave open is taken from there
            yield generate
        finally:
            anything.generation_config = before


def _seed_of(seed: int, number: int) -> int:
    """Return a seed for sample group ``number``."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return int(torch.randint(1 << 62, (number + 1,), generator=generator, device="cpu")[number])


def _batch_size(model: nn.Module, length: int, cache_memory: int) -> int:
    """Return for how many texts there is memory, one at least. Local."""
    if getattr(text_config(model), "model_type", "") == "rwkv":  # transformers broadcasts states of a batch over others
        return 1
    return max(cache_memory // _text_bytes(model, length), 1)


def _text_bytes(model: nn.Module, length: int) -> int:
    """Return what a text takes while it is written: keys and values, and logits. Local."""
    config = text_config(model)

    def size(name: str, default: int = 0) -> int:
        value = largest_said(config, name)
        return value if isinstance(value, int) and value > 0 else default

    heads, width = size("num_attention_heads", 1), size("hidden_size", _UNKNOWN_WIDTH)
    widths = 2 * size("num_key_value_heads", heads) * size("head_dim", width // heads)
    if size("qk_head_dim"):  # multi-head latent attention
        widths = heads * (size("qk_head_dim") + size("v_head_dim"))
    element = max((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4)
    return size("num_hidden_layers", _UNKNOWN_LAYERS) * widths * length * element + _LOGIT_BYTES * vocabulary_of(model)
