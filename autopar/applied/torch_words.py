"""Add to torch's errors: what of the model this rank holds, and what works with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import tensor as dtensor

from autopar.applied.state import Parallelized
from autopar.errors import AutoparError
from autopar.tensor_parallel.parameter_marks import describe_stage

_DTENSOR = ("DTensor", "Sharding propagation failed", "sharding strategy")
_COPIES, _UNUSED = "FSDP does not support deepcopy", "appears to not have been used in the graph"
_EMPTY, _ASSIGNED = "optimizer got an empty parameter list", "(torch.nn.Parameter or None expected)"
_SIZES = "The size of tensor a ("
_FILES = dtensor.__file__.rpartition("/")[0] + "/"


def explained(model: nn.Module, state: Parallelized) -> Callable[[BaseException], str | None]:
    """Return a function that returns what to add to an error, or None. It holds model and state weakly."""
    of, its = weakref.ref(model), weakref.ref(state)

    def explain(error: BaseException) -> str | None:
        model, state = of(), its()
        if model is None or state is None or isinstance(error, AutoparError):
            return None
        note = _of_dtensors(error, state.config.zero_stage) if state.config.fully_sharded else None
        held = describe_stage(model, state.stages, state.mpu)
        return note or (_of_stages(error, held) if state.stages.ranks > 1 else None)

    return explain


def _of_dtensors(error: BaseException, stage: int) -> str | None:
    text = str(error)
    if _COPIES in text:
        return (
            f"autopar: with zero.stage {stage} torch's FSDP2 holds the weights. Make a second model before "
            "autopar.initialize (and initialize it, too);\n  {name: p.detach().clone() for name, p in "
            "model.named_parameters()} copies the weights (an average of them, a start)."
        )
    if _UNUSED in text:
        return (
            f"autopar: with zero.stage {stage} torch's FSDP2 computes with gathered weights, whose gradients come into "
            "parameter.grad:\n  loss.backward() instead of torch.autograd.grad(loss, parameters)."
        )
    if not any(words in text for words in _DTENSOR) and not _comes_from(error, _FILES):
        return None
    return (
        f"autopar: with zero.stage {stage} parameters and gradients are torch's DTensors; a replica has some rows of "
        "each. Of p:\n  autopar.full(p) is all of it, on all ranks, also for a penalty in the loss; p.to_local() is "
        "what is here;\n  a module inside of a block gets its weights in the forward of the block: call the block;\n  "
        "torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements) makes a DTensor of a mask,\n  "
        "or of new values for p.copy_()."
    )


def _comes_from(error: BaseException, files: str) -> bool:
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(files)


def _of_stages(error: BaseException, held: str) -> str | None:
    if isinstance(error, ValueError) and _EMPTY in str(error):
        return (
            f"autopar: {held}, and these weights are on other stages.\n  Make the optimizer before autopar.initialize "
            "and give it (optimizer=): a stage keeps its own. Or make it where there are weights:\n"
            "  optimizer = AdamW(parameters) if parameters else None, and step it there."
        )
    if isinstance(error, TypeError) and _ASSIGNED in str(error):
        return (
            f"autopar: {held}. What stands for the others is no parameter.\n  Tie weights, or put others in their "
            "place, before autopar.initialize."
        )
    if isinstance(error, RuntimeError) and _SIZES in str(error):
        return (
            f"autopar: {held}. model.parameters() are these alone: pair them with other tensors\n  by name "
            "(model.named_parameters()), not by their place in a list."
        )
    return None
