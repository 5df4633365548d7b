"""Save and load sharded checkpoints on any mesh, and convert them to Hugging Face's form.

Public names are imported at their first use, because ``initialize`` needs none of them.
"""

from typing import TYPE_CHECKING

from autopar.registry import lazy_names

if TYPE_CHECKING:
    from autopar.checkpoint.dtensor import (
        load_dtensor_state_dict as load_dtensor_state_dict,
        to_dtensor_state_dict as to_dtensor_state_dict,
        to_dtensor_training_state as to_dtensor_training_state,
    )
    from autopar.checkpoint.extra import ShardedDict as ShardedDict
    from autopar.checkpoint.format import Manifest as Manifest
    from autopar.checkpoint.methods import attach as attach, detach as detach
    from autopar.checkpoint.offline import (
        merge_checkpoint as merge_checkpoint,
        reshard_checkpoint as reshard_checkpoint,
    )
    from autopar.checkpoint.shards import check_checkpoint as check_checkpoint

_HOMES = {
    name: f"{__name__}.{home}"
    for home, names in {
        "dtensor": "load_dtensor_state_dict to_dtensor_state_dict to_dtensor_training_state",
        "extra": "ShardedDict",
        "format": "Manifest",
        "methods": "attach detach",
        "offline": "merge_checkpoint reshard_checkpoint",
        "shards": "check_checkpoint",
    }.items()
    for name in names.split()
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
