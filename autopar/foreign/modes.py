"""torch's modes that see every operation, and how a tensor subclass gets around itself."""

import torch
from torch._dynamo.eval_frame import skip_code as leave_alone  # code runs as it is, also in what is compiled
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_torch_dispatch_mode,
)
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

__all__ = [
    "TorchDispatchMode",
    "disabled_torch_function",
    "dispatch_modes",
    "function_modes",
    "is_in_torch_dispatch_mode",
    "leave_alone",
    "no_dispatch_modes",
    "no_overrides",
]

no_overrides = torch._C.DisableTorchFunctionSubclass  # inside of it no subclass sees functions
disabled_torch_function = torch._C._disabled_torch_function_impl  # the __torch_function__ of a class that wants none
