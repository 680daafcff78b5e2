"""Mirror of `torch.distributed.checkpoint._state_dict_stager`: re-exports only."""

from dcp_async.staging.stagers import StateDictStager as StateDictStager
