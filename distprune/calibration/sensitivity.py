"""How much the loss feels what each linear layer puts out: one backward pass over the calibration samples.

Nouns: the *sensitivity* of an output of a layer is r_i = sum over tokens of (dL/dy_i)^2, L the cross-entropy of the
next tokens and y (tokens, out) what the layer puts out. The moments of its inputs are taken on the way.

No gradient of a weight is computed: parameters need none while the pass lasts, and the first layers ask for gradients
of their inputs, so that those of all outputs flow. Of one batch at a time the hidden states between blocks are kept,
and the activations of one block, which runs once more in the backward pass.

As in :mod:`distprune.calibration.statistics`, ranks of a sample group take some features each; sums are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distprune.calibration.data import device_of, tokens_together
from distprune.calibration.listening import first_layers
from distprune.calibration.moments import column_norms
from distprune.calibration.sample_group import SampleGroup, find_sample_group, flat_local
from distprune.calibration.walk import Batch, named, spread
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator
from distprune.models.cross_entropy import cross_entropy
from distprune.models.decoder_blocks import bare_model, decoder_blocks
from distprune.models.evaluating import evaluating, keeping_weights, needing_gradients, replacing_forwards
from distprune.models.experts import expert_gradients
from distprune.models.linear_layers import LinearLayer
from distprune.models.runnable import logits_on_tokens
from distprune.shards.device import are_finite, batches, fetched
from distprune.shards.in_step import in_step

_COPIES = 4  # of logits: theirs, those that predict, and the gradients of both
_NUM_TOGETHER = 1 << 20  # numbers that are summed in a round
_EXPERTS_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of every experts module of transformers 5


@dataclass(frozen=True)
class Sensitivity:
    """Of one linear layer, over all ranks' tokens: ``inputs`` (in,) are the sums of squares of the features it is
    given, ``outputs`` (out,) those of the gradients of what it puts out; float32. All are 0 without a token, and where
    the layer runs without gradients (an indexer of attention)."""

    inputs: torch.Tensor
    outputs: torch.Tensor


def measure_sensitivities(
    comm: Communicator,
    model: nn.Module,
    linears: Mapping[str, LinearLayer],
    samples: torch.Tensor,
    progress: Callable[[int, int], None] | None = None,
    batch_tokens: int | None = None,
) -> dict[str, Sensitivity]:
    """Return the sensitivity of each of ``linears``, layers in decoder blocks by their names in ``model``.

    ``samples`` (num_samples, length) are the same on every rank; ``batch_tokens`` run together, see
    ``tokens_together``. ``model`` is run in evaluation mode and left as is: weights, gradients, which parameters need
    some, modes and random state. Every rank must call it. Rounds: those of :func:`find_sample_group`, of
    :func:`in_step`, of :func:`sums_of_all` for each input and output of the layers, and 2 of 64 bytes.

    Raises:
        ValueError: on every rank: NaN or Inf in the loss, with the samples, or in a gradient, with the layer; torch's
            inference mode.
        NotImplementedError: on every rank: inputs or outputs that are cut otherwise than evenly along their features;
            experts that are called otherwise than transformers 5 calls them; logits that are cut.
        RuntimeError: on every rank: a forward that changes the model's own weights.
        Exception: on every rank: what a pass, or ``progress``, raised on one; but for those of which
            :func:`in_step` says that the others cannot be told.
    """
    sample_group, bare = find_sample_group(comm, model), bare_model(model)
    device = device_of(bare)
    with together(comm):
        if torch.is_inference_mode_enabled():
            raise ValueError("it takes gradients: call it outside of torch.inference_mode()")
        listener = _BackwardListener(sample_group, linears, device)
        mine = spread(samples, sample_group, tokens_together(model, batch_tokens, _COPIES), device)
        blocks = [block for _, block in decoder_blocks(model)]
    # Of a block, what it is given is kept, not what it computes: the backward pass runs it once more.
    forwards = replacing_forwards(blocks, lambda block: partial(checkpoint, block.forward, use_reentrant=False))
    several = in_step(comm, bare, layers_communicate=sample_group.size > 1)
    with (
        several as run,
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(bare),
        keeping_weights(bare),
        torch.enable_grad(),
        needing_gradients(bare, ()),
        forwards,
        listener.listening(),
    ):
        for number, batch in enumerate(mine, 1):
            run(listener.run, bare, batch)
            if progress is not None:
                progress(number, len(mine))
        listener.check()
    sums = sums_of_all(comm, listener.sizes, listener.whole)
    with together(comm):
        inputs, outputs = ([total.float() for total in sums[which::2]] for which in (0, 1))
        return dict(zip(linears, map(Sensitivity, inputs, outputs), strict=True))


def sums_of_all(comm: Communicator, sizes: Sequence[int], make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums over ranks, float64, of what ``make`` returns for each number, 1-D of these ``sizes``.

    Every rank must call it: as many rounds as 8 MiB hold. What ``make`` raises on one rank is raised on all.
    """
    sums = list[torch.Tensor]()
    for some in batches(enumerate(sizes), _NUM_TOGETHER):
        numels = [sizes[i] for i in some]

        def fill(words: torch.Tensor, some: list[int] = some, numels: list[int] = numels) -> None:
            for part, values in zip(torch.split(words, numels), fetched([make(i) for i in some]), strict=True):
                part.copy_(values)

        sums += torch.split(sum_together(comm, (sum(numels),), fill, torch.float64), numels)
    return sums


class _BackwardListener:
    """Takes in, through hooks, what layers are given and the gradients of what they put out; sums of this rank."""

    def __init__(self, sample_group: SampleGroup, linears: Mapping[str, LinearLayer], device: torch.device) -> None:
        self._sample_group, self._linears = sample_group, linears
        self._numbers = {name: 2 * i for i, name in enumerate(linears)}  # of the sum of inputs; that of outputs follows
        self.sizes = [size for linear in linears.values() for size in (linear.num_in, linear.num_out)]
        bounds = map(sample_group.features, self.sizes)  # of this rank's features
        self._sums = [torch.zeros(stop - start, dtype=torch.float64, device=device) for start, stop in bounds]
        self._losses: list[tuple[range, torch.Tensor]] = []  # of the windows of each batch that counts
        self._counts = False  # not while a block runs once more, nor for a batch that does not count

    @property
    def _takes(self) -> bool:
        """Whether what a layer is now given and puts out counts: not what it does without gradients."""
        return self._counts and torch.is_grad_enabled()

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in first_layers(self._linears).items():
                # Under tensor parallelism first of all hooks, and last of all: it wraps inputs and unwraps outputs.
                is_first = self._sample_group.size > 1
                given = module.register_forward_pre_hook(partial(self._given, name), prepend=is_first, with_kwargs=True)
                stack.callback(given.remove)
                stack.callback(module.register_forward_hook(partial(self._put_out, name), with_kwargs=True).remove)
            yield

    def run(self, model: nn.Module, batch: Batch) -> None:
        """Run a batch forward and backward, and take in what it says, if it is no padding."""
        self._counts = bool(batch.windows)
        try:
            logits = logits_on_tokens(model, **batch.inputs)
        finally:
            self._counts = False
        predicting, targets = logits[:, :-1].flatten(0, 1), batch.inputs["input_ids"][:, 1:].flatten()
        if not predicting.requires_grad:
            raise NotImplementedError(
                "no gradient reaches the logits: does the forward use torch.utils.checkpoint with use_reentrant=True? "
                "use_reentrant=False works"
            )
        gradient = torch.empty_like(predicting)
        loss = cross_entropy(predicting.detach(), targets, gradient)
        torch.autograd.backward(predicting, gradient)
        if batch.windows:
            self._losses.append((batch.windows, loss))

    def check(self) -> None:
        """Check what all batches came to. Local, one wait for a device.

        Raises:
            ValueError: NaN or Inf.
        """
        losses = fetched([loss for _, loss in self._losses])
        for (windows, _), loss in zip(self._losses, losses, strict=True):
            if not loss.isfinite():
                raise ValueError(f"the loss of calibration samples {named(windows)} is {loss}")
        finite = fetched([are_finite(total) for total in self._sums])
        for name, inputs, outputs in zip(self._linears, finite[::2], finite[1::2], strict=True):
            if not (inputs and outputs):
                what = "gradients of what it puts out" if inputs else "inputs"
                raise ValueError(f"{name!r}: NaN or Inf in the {what} in calibration samples")

    def whole(self, number: int) -> torch.Tensor:
        """Return a sum of this rank's, zero of features that are not its own."""
        own, size = self._sums[number], self.sizes[number]
        start, stop = self._sample_group.features(size)
        return own if len(own) == size else nn.functional.pad(own, (start, size - stop))

    def _given(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Take in the inputs of a linear layer, and return them so that gradients of outputs flow."""
        is_linear = self._linears[name].expert is None
        key = "hidden_states" if args or not is_linear else next(iter(kwargs))
        x = args[0] if args else kwargs[key]
        if is_linear and self._takes:
            self._add(name, x, 0)
        if not x.requires_grad:  # nothing that does comes before
            x = x.detach().requires_grad_()
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, key: x})

    def _put_out(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Have the gradients of outputs taken in; of experts, which layer ``name`` is one of, all that they are."""
        linear = self._linears[name]
        if not self._takes:
            return
        if linear.expert is None:
            output.register_hook(lambda gradient: self._add(name, gradient, 1))
            return
        prefix = name.removesuffix(f"{linear.parameter_name}.{linear.expert}")
        given = {**dict(zip(_EXPERTS_ARGUMENTS, args, strict=False)), **kwargs}
        if not all(isinstance(given.get(key), torch.Tensor) for key in _EXPERTS_ARGUMENTS):
            raise NotImplementedError(
                f"the experts {prefix.rstrip('.')!r} ({type(module).__name__}) are not called with "
                f"{', '.join(_EXPERTS_ARGUMENTS)}: their shares cannot be found by gradients; share out uniformly"
            )
        hidden, index, weights = (given[key].detach() for key in _EXPERTS_ARGUMENTS)
        hidden = flat_local(hidden)

        def take(gradient: torch.Tensor) -> None:
            for of_expert, x, of_output in expert_gradients(module, hidden, index, weights, flat_local(gradient)):
                if prefix + of_expert in self._linears:
                    self._add(prefix + of_expert, x, 0)
                    self._add(prefix + of_expert, of_output, 1)

        output.register_hook(take)

    def _add(self, name: str, x: torch.Tensor, which: int) -> None:
        """Add the squares of ``x`` (..., features), inputs of layer ``name`` (0) or gradients of its outputs (1)."""
        number = self._numbers[name] + which
        self._sample_group.check_cut(x, self.sizes[number], f"{name!r} {'puts out' if which else 'is given'}")
        own = self._sample_group.own_features(x, self.sizes[number])
        norms = column_norms(own, 2)
        self._sums[number].addcmul_(norms, norms)
