"""``BasePruningMethod`` and ``PruningContainer``: the contract of ``torch.nn.utils.prune``, in any layout."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distprune.collectives import Alone, Communicator, Group, Roster, communicator
from distprune.masks import product, undo_reparametrization
from distprune.methods import reparametrize
from distprune.methods.agreement import agree_on, settle_owners
from distprune.methods.decide import Scope
from distprune.shards import LocalShard, Matrix, dtensor_like, is_held, is_laid_out_like, local_of, local_shard

__all__ = ["BasePruningMethod", "Part", "PruningContainer", "Selecting", "mask_by_user"]


class BasePruningMethod(torch_prune.BasePruningMethod):
    """Base of all pruning methods; see ``torch.nn.utils.prune.BasePruningMethod``.

    A subclass sets ``PRUNING_TYPE`` (``"unstructured"``, ``"structured"`` or ``"global"``) and writes
    :meth:`compute_mask`. On plain modules that is called as PyTorch calls it. On sharded ones ``t`` and
    ``default_mask`` are DTensors in the parameter's layout, and what is returned must be one too: work
    elementwise (``default_mask * (t.abs() >= 0.1)``). What ranks elements against each other belongs in
    the importance scores of :class:`distprune.L1Unstructured`.
    """

    PRUNING_TYPE: ClassVar[str]
    _tensor_name: str

    @override
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Put the product into ``module`` under the parameter's name: a forward pre-hook. No communication."""
        setattr(module, self._tensor_name, self.apply_mask(module))

    @abstractmethod
    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask for ``t``, of the same shape, on top of ``default_mask``."""

    @override
    def apply_mask(self, module: nn.Module) -> torch.Tensor:
        """Return the product of mask and original, in the original's layout. No communication.

        Raises:
            AssertionError: the method has not been applied to a parameter.
        """
        if getattr(self, "_tensor_name", None) is None:
            raise AssertionError(f"Module {module} has to be pruned")
        return product(module, self._tensor_name)

    @classmethod
    @override
    def apply(
        cls,
        module: nn.Module,
        name: str,
        *args: Any,
        importance_scores: torch.Tensor | None = None,
        group: Group = None,
        **kwargs: Any,
    ) -> torch_prune.BasePruningMethod:
        """Prune ``name`` in ``module`` by this method and return its hook: the method, or a container of all so far.

        Every rank of ``group`` must call it, with its own part of the same module. ``args`` and
        ``kwargs`` go to the constructor. ``importance_scores``: of the global shape, plain and whole, or
        a DTensor in the parameter's layout. Rounds: one to agree, those of the method, one at the end.

        Raises:
            AssertionError: scores or a mask of another shape.
            AttributeError: ``name`` is no attribute of ``module``.
            TypeError: ``name`` is no parameter, or the method's own.
            ValueError: ranks disagree, NaN scores, a layout that cannot be brought over, or the method's own.
            NotImplementedError: FSDP1, ``Partial``, a parameter FSDP2 shares between modules, or a
                ``compute_mask`` that does not work on shards.
        """
        from distprune.methods.call import prune_targets  # which is written in terms of this class

        scores = None if importance_scores is None else {(module, name): importance_scores}
        return prune_targets(communicator(group), [(module, name)], lambda: cls(*args, **kwargs), scores)[0]

    @override
    def prune(
        self,
        t: torch.Tensor,
        default_mask: torch.Tensor | None = None,
        importance_scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``t`` times the mask that :meth:`compute_mask` gives for it, in the layout of ``t``.

        Where ``t`` is a DTensor, every rank of the default group must call it.

        Raises:
            AssertionError: ``importance_scores`` of another shape.
        """
        if importance_scores is None:
            importance_scores = t
        elif importance_scores.shape != t.shape:
            raise AssertionError(
                f"importance_scores should have the same shape as tensor t, got {importance_scores.shape} vs {t.shape}"
            )
        default_mask = default_mask if default_mask is not None else torch.ones_like(t)
        return t * self.compute_mask(importance_scores, default_mask=default_mask)

    @override
    def remove(self, module: nn.Module) -> None:
        """Make the pruning of ``module`` permanent, and the parameter what it was, under its old name. Local.

        The hook itself stays registered, as in PyTorch; :func:`distprune.remove` takes it out too.

        Raises:
            AssertionError: the method has not been applied to a parameter.
        """
        name = getattr(self, "_tensor_name", None)
        if name is None:
            raise AssertionError(f"Module {module} has to be pruned before pruning can be removed")
        undo_reparametrization(module, name)


@dataclass(frozen=True)
class Part:
    """One parameter of a call on this rank, owners settled: what a method of ours decides on."""

    shard: LocalShard  # the values that are ranked, local shape
    mask: torch.Tensor | None  # bool, local shape: what is kept so far; None: everything
    has_scores: bool  # the values are importance scores, which count as they are
    index: int  # of the parameter in the call


class Selecting(BasePruningMethod):
    """A method of this library: decides on the shards of many parameters at once."""

    @abstractmethod
    def local_masks(
        self, comm: Communicator, roster: Roster, parts: Sequence[Part], scope: Scope
    ) -> list[torch.Tensor]:
        """Return what to multiply into each part's mask (local shape). Every rank must call it."""

    def check(self, shape: Sequence[int]) -> None:
        """Raise if the method cannot prune a parameter of this global ``shape``."""

    def matrix_of(self, module: nn.Module, name: str, shape: Sequence[int]) -> Matrix | None:
        """Return how parameter ``name`` of ``module`` is a matrix, if the method cares; raise if it cannot prune it."""

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass computes masks in its own way."""
        return type(self).compute_mask is not Selecting.compute_mask

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return ``default_mask`` with what the method prunes of ``t`` set to zero, all of ``t`` competing.

        Where ``t`` is a DTensor, every rank of the default group must call it; the mask is a DTensor then.
        """
        return self.mask_among(t, default_mask, None)

    def mask_among(self, t: torch.Tensor, default_mask: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
        """Return ``default_mask`` times what is kept among the elements at which ``earlier`` is not zero."""
        comm = communicator() if isinstance(t, DTensor) else Alone()
        self.check(t.shape)
        mask = None if earlier is None else local_of(earlier).bool()
        matrix = self.matrix_of(nn.Module(), "t", t.shape)
        shards = [dataclasses.replace(local_shard("0.t", t), matrix=matrix)] if is_held(t) else []
        roster, _ = agree_on(comm, shards, {"method": reparametrize.described(self)})
        parts = [Part(shard, mask, True, 0) for shard in settle_owners(comm, shards, roster)]
        keep = self.local_masks(comm, roster, parts, "tensor")
        if not isinstance(t, DTensor):
            return default_mask * keep[0].to(default_mask.dtype)
        local = (keep[0] if keep else t.to_local().bool()).reshape(t.to_local().shape)
        return default_mask * dtensor_like(t, local)


class PruningContainer(BasePruningMethod, torch_prune.PruningContainer):
    """The methods applied to one parameter, in order; see ``torch.nn.utils.prune.PruningContainer``.

    Adding a method raises ``TypeError`` if it is none, and ``ValueError`` if it acts on another name.
    """

    def __init__(self, *args: Any) -> None:
        self._pruning_methods: tuple[torch_prune.BasePruningMethod, ...] = ()
        if len(args) == 1:
            self._tensor_name = args[0]._tensor_name
        for method in args:
            self.add_pruning_method(method)

    @override
    def add_pruning_method(self, method: Any) -> None:
        """Append ``method``, which must act on the parameter of the same name."""
        if method is not None and not isinstance(method, torch_prune.BasePruningMethod):
            raise TypeError(f"{type(method)} is not a BasePruningMethod subclass")
        if method is not None and self._tensor_name != method._tensor_name:
            raise ValueError(
                f"Can only add pruning methods acting on the parameter named '{self._tensor_name}' to "
                f"PruningContainer {self}. Found '{method._tensor_name}'"
            )
        self._pruning_methods += (method,)  # type: ignore[operator]

    @override
    def __len__(self) -> int:
        return len(self._pruning_methods)

    @override
    def __iter__(self) -> Iterator[torch_prune.BasePruningMethod]:
        return iter(self._pruning_methods)

    @override
    def __getitem__(self, idx: Any) -> Any:
        return self._pruning_methods[idx]

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return ``default_mask`` with the latest method's mask on top, computed on what was left of ``t``.

        By its ``PRUNING_TYPE``: ``"unstructured"`` sees the elements that are left, ``"structured"`` the
        channels, ``"global"`` everything.

        Raises:
            ValueError: an unknown ``PRUNING_TYPE``.
            AttributeError: a structured method without ``dim``.
        """
        method = self._pruning_methods[-1]
        check_type(method)
        if isinstance(method, Selecting) and not method.is_overridden:
            kind = pruning_type(method)
            left = {"unstructured": default_mask == 1, "structured": default_mask != 0}
            mask = method.mask_among(t, default_mask, left.get(kind))
            if isinstance(t, DTensor) or kind != "unstructured":
                return mask
            return torch.where(default_mask == 1, mask, default_mask).to(t.dtype)
        return mask_by_user(method, t, default_mask, again=True)


def pruning_type(method: torch_prune.BasePruningMethod) -> str:
    return str(cast(Any, method).PRUNING_TYPE)


def check_type(method: torch_prune.BasePruningMethod) -> None:
    """Raise unless ``method`` says how its masks combine with earlier ones, as ``PruningContainer`` does.

    Raises:
        ValueError: an unknown ``PRUNING_TYPE``.
        AttributeError: a structured method without ``dim``.
    """
    kind = pruning_type(method)
    if kind not in ("unstructured", "structured", "global"):
        raise ValueError(f"Unrecognized PRUNING_TYPE {kind}")
    if kind == "structured" and "dim" not in dir(method):
        raise AttributeError('Pruning methods of PRUNING_TYPE "structured" need to have the attribute `dim` defined.')


def mask_by_user(
    method: torch_prune.BasePruningMethod, t: torch.Tensor, default_mask: torch.Tensor, *, again: bool
) -> torch.Tensor:
    """Return the mask a user's method computes, in the layout of ``t``. No communication.

    Plain tensors: as PyTorch calls it; ``again``: on what ``default_mask`` leaves. DTensors: on all of
    the shard at once, which is the same for a method that works elementwise.

    Raises:
        NotImplementedError: the method needs more than its shard.
    """
    if isinstance(t, DTensor):
        return _on_shards(method, t, cast(DTensor, default_mask))
    if not again:
        computed: torch.Tensor = cast(Any, method).compute_mask(t, default_mask=default_mask)
        return computed
    place = _place_of_type(method, t, default_mask)
    mask = default_mask.to(dtype=t.dtype, copy=True)
    mask[place] = cast(Any, method).compute_mask(t[place], default_mask=default_mask[place]).to(dtype=mask.dtype)
    return mask


def _place_of_type(method: torch_prune.BasePruningMethod, t: torch.Tensor, mask: torch.Tensor) -> Any:
    """Return the index of what a method of this ``PRUNING_TYPE`` gets to see."""
    kind = pruning_type(method)
    if kind == "unstructured":
        return mask == 1
    if kind == "global":
        return ...
    dim = cast(Any, method).dim
    if not -t.dim() <= dim < t.dim():
        raise IndexError(f"Index is out of bounds for tensor with dimensions {t.dim()}")
    others = [other for other in range(t.dim()) if other != dim % t.dim()]
    return (slice(None),) * (dim % t.dim()) + (mask.sum(dim=others) != 0,)


class _NoScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to turn a DTensor into a number: what a rank would get is its own part's."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor)
        if is_number and not all(isinstance(placement, Replicate) for placement in args[0].placements):
            raise RuntimeError("item() of a DTensor is a number of this rank's shard alone")
        return func(*args, **(kwargs or {}))


def _on_shards(method: torch_prune.BasePruningMethod, t: DTensor, default_mask: DTensor) -> torch.Tensor:
    name = type(method).__name__
    advice = (
        f"{name}.compute_mask must work elementwise on a sharded parameter, for example "
        "`return default_mask * (t.abs() >= threshold)`; to rank elements, pass importance_scores to "
        "distprune.l1_unstructured or global_unstructured instead"
    )
    try:
        # DTensor would gather the parameter without a word; that is not what anybody wants here.
        context = cast("AbstractContextManager[None]", ExplicitRedistributionContext(strict=True))
        with context, _NoScalars(), torch.no_grad():  # type: ignore[no-untyped-call]
            mask: torch.Tensor = cast(Any, method).compute_mask(t, default_mask=default_mask)
    except (ValueError, TypeError, AssertionError):
        raise
    except Exception as error:
        raise NotImplementedError(f"{advice} ({type(error).__name__}: {error})") from error
    if not is_laid_out_like(mask, t) or mask.shape != t.shape:
        got = f"{type(mask).__name__} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise NotImplementedError(f"{advice}; it returned a {got}, not a DTensor in the parameter's layout")
    return mask
