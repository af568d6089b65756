"""The private names of torch that distprune relies on are there, and a torch without one is told at once."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from distprune.shards.torch_private import private
from tests.worlds import run_threads

# What is asked of objects of FSDP1 and FSDP2, by class. torch 2.13 has public calls that come near, and do other
# things: FSDPModule.set_reshard_after_forward does not say how it was before, and takes no replicated groups;
# reset_iter_state is for roots alone, and drops gradients that are being accumulated.
ATTRIBUTES = {
    "FullyShardedDataParallel": "_handle",
    "FlatParamHandle": "flat_param uses_sharded_strategy process_group",
    "FlatParameter": "_param_infos _shapes _numels _shard_param_infos _shared_param_infos",
    "FSDPModule": "_get_fsdp_state",
    "FSDPState": "_fsdp_param_group _lazy_init _modules _modules_to_run_forward _state_ctx _training_state "
    "_states_to_backward_prefetch _states_to_forward_prefetch",
    "FSDPStateContext": "all_states iter_forward_root post_backward_final_callback_queued",
    "FSDPParamGroup": "_module_to_pre_load_state_dict_hook_handle _module_to_pre_save_state_dict_hook_handle "
    "_post_forward_indices _reset_sharded_params _training_state comm_ctx fsdp_params "
    "post_forward_mesh_info reshard",
    "FSDPParam": "_module_info _orig_size _param_fqn _post_load_hook_handle _setattr_on_modules "
    "_sharded_param_data _sharding_spec device fsdp_placement init_dtype_attrs mesh_info mp_policy "
    "offload_to_cpu pin_memory post_forward_mesh_info reset_sharded_param sharded_param",
    "ParamModuleInfo": "module param_name shared_modules shared_param_names",
    "DTensor": "_cdata _local_tensor _post_accumulate_grad_hooks _spec",
}


def test_this_torch_has_all() -> None:
    def look(_: int) -> None:
        one: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        other: Any = FullyShardedDataParallel(
            nn.Linear(4, 4),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.NO_SHARD,
        )
        for model in (one, other):
            model(torch.ones(1, 4))
        state: Any = one._get_fsdp_state()
        group = state._fsdp_param_group
        param, handle = group.fsdp_params[0], other._handle
        things = (one, state, state._state_ctx, group, param, param._module_info, param.sharded_param)
        seen = set()
        for thing in (*things, other, handle, handle.flat_param):
            kinds = ["FlatParameter"] if thing is handle.flat_param else [kind.__name__ for kind in type(thing).__mro__]
            for kind in ATTRIBUTES.keys() & kinds:
                seen.add(kind)
                # Not hasattr: properties would be run.
                assert [
                    name for name in ATTRIBUTES[kind].split() if inspect.getattr_static(thing, name, look) is look
                ] == []
        assert seen == ATTRIBUTES.keys()

    run_threads(1, look)


@pytest.mark.parametrize("names", [("torch", "is_no_name"), ("torch.is_no_module", "name")], ids=str)
def test_a_name_that_is_not_there(names: tuple[str, str]) -> None:
    assert private(*names, is_optional=True) is None
    with pytest.raises(ImportError, match=f"torch {torch.__version__} has no {'.'.join(names)}".replace("+", r"\+")):
        private(*names)


def test_a_torch_without_one_is_told_at_once() -> None:
    code = "import torch.distributed._composable_state as c; del c._module_state_mapping; import distprune"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no torch.distributed._composable_state._module_state_mapping" in done.stderr.splitlines()[-1]
