"""What a parallelized model does on an accelerator, on one that is simulated; compared with the plain one on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from tests.gpu import simulated
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.parity import close, whole
from tests.small import gpt2, llama, parallel

pytestmark = needs_compiler
IDS = torch.randint(0, 131, (4, 9), generator=torch.Generator().manual_seed(3))
FAMILIES = {"gpt2": gpt2, "llama": llama}


@pytest.mark.parametrize("family", FAMILIES)
@on_device(world_size=2)
def test_explore(family: str) -> None:
    plain = FAMILIES[family]()
    model = copy.deepcopy(plain)
    model = parallel(model, 2, consistency_check={"enable": False})
    print(model.mpu.device, {p.device for p in model.parameters()}, {b.device for b in model.buffers()})
    ids = IDS.to(model.mpu.device)
    expected = plain(IDS, labels=IDS)
    expected.loss.backward()
    with simulated.waits() as found:
        out = model(ids, labels=ids)
        out.loss.backward()
    for w in sorted(set(found)):
        print("WAIT", w.what, w.place, w.stack[:4])
    close(out.logits.detach().cpu(), expected.logits.detach(), "logits")
    for name, gradient in whole(model, lambda parameter: parameter.grad).items():
        close(gradient, plain.get_parameter(name).grad, name)
    1 / 0
