"""A mask on a parameter: in place, or reparametrized as ``torch.nn.utils.prune`` does it."""

from distprune.masks.fsdp2 import Fsdp2Params, Managed, kept_gathered, own_params, reset_forward, take_roots
from distprune.masks.fsdp2_resize import drop_modules, even_parts, resize
from distprune.masks.hooks import pruning_hooks
from distprune.masks.in_place import (
    Zeroing,
    as_numbers,
    bits_of,
    make_zeros_positive,
    read_kept,
    seems_kept,
    settle_kept,
    write_negative_zeros,
    zero_where_pruned,
)
from distprune.masks.plain_keys import dense_state_dict
from distprune.masks.reparametrized import (
    mask_of,
    product,
    product_of_hook,
    reparametrize,
    snapshot,
    undo_reparametrization,
)

__all__ = [
    "Fsdp2Params",
    "Managed",
    "Zeroing",
    "as_numbers",
    "bits_of",
    "dense_state_dict",
    "drop_modules",
    "even_parts",
    "kept_gathered",
    "make_zeros_positive",
    "mask_of",
    "own_params",
    "product",
    "product_of_hook",
    "pruning_hooks",
    "read_kept",
    "reparametrize",
    "reset_forward",
    "resize",
    "seems_kept",
    "settle_kept",
    "snapshot",
    "take_roots",
    "undo_reparametrization",
    "write_negative_zeros",
    "zero_where_pruned",
]
