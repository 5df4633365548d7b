"""Documents packed into one row, told apart by position_ids that start again, against each by itself."""

import copy

import pytest
import torch
from transformers import DataCollatorWithFlattening

import autopar
from autopar.pipeline_parallel.outputs import find_cache
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama

LENGTHS = (5, 9, 3)


def check(**sizes: int) -> None:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 131, (length,), generator=generator) for length in LENGTHS]
    packed = DataCollatorWithFlattening()([{"input_ids": one.tolist()} for one in documents])
    assert packed["position_ids"].flatten().tolist() == [place for length in LENGTHS for place in range(length)]
    packed = {name: torch.as_tensor(value) for name, value in packed.items()} | {"use_cache": False}
    plain = llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=2).train()
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes}).train()
    tokens = sum(LENGTHS) - len(LENGTHS)
    logits, loss = [], torch.zeros(())
    for one in documents:
        output = plain(one[None], labels=one[None])
        logits.append(output.logits.detach())
        loss = loss + output.loss * (len(one) - 1) / tokens
    loss.backward()
    if model.mpu.pp.size == 1:
        output = model(**packed)
        output.loss.backward()
        close(output.logits.detach(), torch.cat(logits, 1), "logits")
    else:
        output = model.execute_pipeline(packed)
    if output.loss is not None:
        close(output.loss.detach(), loss.detach(), "loss")
    same_gradients(model, plain)
    with torch.no_grad():
        close(model.eval()(**{k: v for k, v in packed.items() if k != "labels"}).logits, torch.cat(logits, 1), "logits")
    model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_packed_documents_through_stages_of_two_ranks() -> None:
    check(tensor_parallel_size=2, pipeline_parallel_size=2)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_training_pass_makes_no_cache_where_transformers_does_the_same_without() -> None:
    """Positions that are given may start again, and with a cache transformers does not see it."""
    plain = llama().train()
    ids = torch.randint(0, 131, (2, 8), generator=torch.Generator().manual_seed(3))
    again = torch.arange(8).remainder(5).expand(2, -1)
    caches: list[bool] = []
    for given, cached in (({}, False), ({"position_ids": again}, True), ({"use_cache": True}, True)):
        model = autopar.initialize(copy.deepcopy(plain), {"pp": 2, "pipeline": {"microbatch_size": 1}}).train()
        for block in model.model.layers:
            block.register_forward_pre_hook(
                lambda _, args, kwargs: caches.append(find_cache(args, kwargs) is not None), with_kwargs=True
            )
        caches.clear()
        output = model.execute_pipeline({"input_ids": ids, "labels": ids, **given})
        assert set(caches) == {cached}
        reference = copy.deepcopy(plain)
        expected = reference(input_ids=ids, labels=ids, **given).loss
        expected.backward()
        if output.loss is not None:
            close(output.loss.detach(), expected.detach(), "loss")
        same_gradients(model, reference)
        model.mpu.destroy()
