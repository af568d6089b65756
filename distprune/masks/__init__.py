"""A mask on a parameter: in place, or reparametrized as ``torch.nn.utils.prune`` does it."""

from distprune.masks.adapters import merge_adapters
from distprune.masks.fsdp2 import is_masked
from distprune.masks.grouped import Grouped
from distprune.masks.hooks import pruning_hooks
from distprune.masks.in_place import (
    Zeroing,
    as_numbers,
    bring_back,
    goes_beside,
    make_zeros_positive,
    read_kept,
    seems_kept,
    set_aside,
    write_signed_zeros,
    zero_all_where_pruned,
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
from distprune.masks.side_by_side import SideBySide

__all__ = [
    "Grouped",
    "SideBySide",
    "Zeroing",
    "as_numbers",
    "bring_back",
    "dense_state_dict",
    "goes_beside",
    "is_masked",
    "make_zeros_positive",
    "mask_of",
    "merge_adapters",
    "product",
    "product_of_hook",
    "pruning_hooks",
    "read_kept",
    "reparametrize",
    "seems_kept",
    "set_aside",
    "snapshot",
    "undo_reparametrization",
    "write_signed_zeros",
    "zero_all_where_pruned",
    "zero_where_pruned",
]
