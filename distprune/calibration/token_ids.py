"""Token ids in whatever form a user has them, as one tensor. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch

# A tensor, lists of ints, what a tokenizer returns, or anything that yields these, such as a DataLoader.
TokenIds: TypeAlias = torch.Tensor | Mapping[str, Any] | Iterable[Any]

_FORMS = "a tensor (num_samples, length), lists of ints, what a tokenizer returns, or a DataLoader of these"


def as_windows(samples: TokenIds) -> torch.Tensor:
    """Return token ids as a tensor (num_samples, length), int64. Local.

    >>> as_windows([[1, 2], [3, 4]]).tolist()
    [[1, 2], [3, 4]]
    >>> as_windows({"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}).tolist()
    [[1, 2, 3]]

    What an ``attention_mask`` leaves out is dropped: padding would count in statistics. Samples of unequal length are
    joined and cut into windows as long as the longest, as the documents of a calibration file are; what is left over
    is less than one window. A tensor of int64 is returned as it is. Of what can be read once, all is read.

    Raises:
        TypeError: something else than token ids, such as text, or batches of several tensors, such as ids and labels.
        ValueError: there is none.
    """
    if isinstance(samples, torch.Tensor):
        return samples.long() if _is_integer(samples) else samples
    rows = list(_rows(samples))
    length = max(map(len, rows), default=0)
    if length == 0:
        raise ValueError("samples hold no token id")
    joined = torch.cat(rows)
    num = len(joined) // length
    return joined[: num * length].view(num, length)


def as_line(token_ids: TokenIds) -> torch.Tensor:
    """Return all token ids one after the other, 1-D int64: what :func:`as_windows` takes. Local.

    Raises:
        TypeError: something else than token ids, such as text.
    """
    if isinstance(token_ids, torch.Tensor):
        return token_ids.reshape(-1)
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([nothing, *_rows(token_ids)])


def _rows(samples: Any) -> Iterator[torch.Tensor]:
    """Yield every sample, 1-D int64 on the CPU."""
    if isinstance(samples, Mapping):
        if "input_ids" not in samples:
            raise TypeError(f"samples are a mapping without 'input_ids': it has {', '.join(map(str, samples))}")
        rows, mask = _rows(samples["input_ids"]), samples.get("attention_mask")
        mask = mask.long() if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool else mask
        yield from rows if mask is None else (row[kept != 0] for row, kept in zip(rows, _rows(mask), strict=True))
    elif isinstance(samples, torch.Tensor | np.ndarray):
        tensor = torch.from_numpy(samples) if isinstance(samples, np.ndarray) else samples.cpu()
        if not _is_integer(tensor) or tensor.ndim not in (1, 2):
            raise TypeError(f"samples must be {_FORMS}, not a tensor of {tensor.dtype} {tuple(tensor.shape)}")
        yield from (tensor if tensor.ndim == 2 else tensor[None]).long()
    elif isinstance(samples, str | bytes):
        raise TypeError(f"samples are text: {samples[:40]!r}; distprune.calibration_windows(text, tokenizer) makes ids")
    elif isinstance(samples, list | tuple) and all(isinstance(token, Integral) for token in samples):
        yield torch.tensor(samples, dtype=torch.int64, device="cpu")
    elif isinstance(samples, Iterable):
        for part in samples:
            tensors = [one for one in part if isinstance(one, torch.Tensor)] if isinstance(part, list | tuple) else []
            if len(tensors) > 1 and (isinstance(part, tuple) or any(one.ndim > 1 for one in tensors)):
                raise TypeError(
                    f"a batch is a {type(part).__name__} of {len(part)} tensors, and it is not said which are ids: "
                    "pass those alone, such as [batch[0] for batch in loader]"
                )
            yield from _rows(part)
    else:
        raise TypeError(f"samples must be {_FORMS}, not a {type(samples).__name__}")


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
