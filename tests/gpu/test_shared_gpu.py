"""Two ranks over gloo that share one GPU: shards and collectives of CUDA tensors."""

from __future__ import annotations

import copy

import torch

from tests.gpu.places import on_each
from tests.parity import close, whole
from tests.pool import pooled
from tests.small import gpt2, llama, parallel

IDS = torch.randint(0, 131, (3, 9), generator=torch.Generator().manual_seed(3))


@on_each
@pooled(world_size=2)
def test_tensor_parallel_loss_and_gradients_are_the_plain_models(place: str) -> None:
    for build in (gpt2, llama):
        plain, ids = build().to(place), IDS.to(place)
        model = parallel(copy.deepcopy(plain), 2)
        assert {parameter.device.type for parameter in model.parameters()} == {place}
        expected, found = plain(ids, labels=ids).loss, model(ids, labels=ids).loss
        expected.backward()
        found.backward()
        close(found.detach(), expected.detach(), "loss")
        for name, gradient in whole(model, lambda parameter: parameter.grad).items():
            close(gradient, plain.get_parameter(name).grad, name)
        model.mpu.destroy()
