"""The calls that docs/limitations.md lists as errors raise, and the errors name the alternative."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.docs.pages import DOCS, section
from tests.harness.worlds import distributed
from tests.small import gpt2, parallel


@distributed(world_size=2)
def test_what_it_says_raises_does() -> None:
    table = section(DOCS / "limitations.md", "## What raises", "## What does not go together")
    rows = len(re.findall(r"^\| ", table, re.MULTILINE)) - 1  # without the head of the table
    # Ten rows are tested here and seven in the next test. The tests of the other rows:
    # tests/checkpoint/test_dtensor_optimizer.py, tests/data_parallel/test_fully_sharded_compositions.py,
    # test_fully_sharded_stages.py and test_whole_numbers.py, tests/distributed/test_derivatives.py and
    # test_transforms.py, tests/features/context_parallel/test_refused.py,
    # tests/features/generation/test_continuous_batching.py, tests/features/user_code/test_reads_of_dtensors.py,
    # tests/pipeline_parallel/test_inference.py
    assert rows == 27
    model = parallel(gpt2(), 2)
    staged, _ = training(gpt2().eval(), stages=2)
    cache = gpt2()(torch.tensor([[1, 2]]), use_cache=True).past_key_values
    for instead, call in {
        "save_parallelized": lambda: model.save_pretrained("folder"),
        r"merge_checkpoints=True": lambda: type(model).save_pretrained(model, "folder"),
        "after autopar.deparallelize": lambda: model.resize_token_embeddings(200),
        r"after autopar.deparallelize\(model\)": lambda: model.set_input_embeddings(torch.nn.Embedding(131, 36)),
        "use pipeline_parallel_size=1": lambda: staged(torch.tensor([[3]]), past_key_values=cache),
        "autopar.deparallelize": lambda: autopar.initialize(model, {"model_parallelism": {}}),
        r"mpu\.dp\.group": lambda: DistributedDataParallel(model),
        "would fit|that fits": lambda: parallel(gpt2(n_head=1), 2),
        "sizes|divide": lambda: parallel(gpt2(), 3),
        "Largest number of stages that fits this model: 1": lambda: training(gpt2(n_layer=1), stages=2),
    }.items():
        with pytest.raises(autopar.ConfigError, match=instead):
            call()
    last = [parameter for name, parameter in staged.named_parameters() if ".h.1." in name]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            torch.optim.AdamW(last)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
    own = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    with pytest.raises(autopar.ConsistencyError, match=r"autopar\.clip_grad_norm_\(model"):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, own)
    with pytest.raises(autopar.CheckpointError, match="Leave assign out"):
        model.load_state_dict(gpt2().state_dict(), assign=True)
    with pytest.raises(autopar.ConsistencyError, match=r"autopar\.prepare_dataloader"):
        model(torch.tensor([[1, 2, 3 + dist.get_rank()]]))


def training(model: Any, stages: int = 1, **sections: Any) -> Any:
    return autopar.initialize(model, {"pp": stages, **sections}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@distributed(world_size=2)
def test_what_it_says_about_training_raises() -> None:
    ids = torch.tensor([[1, 2, 3 + dist.get_rank()]])
    staged, _ = training(gpt2().train(), stages=2)
    replica, optimizer = training(gpt2(), zero={"stage": 1})
    half, half_optimizer = training(gpt2(), precision={"dtype": "fp16"})
    replica(ids, labels=ids).loss.backward()
    half(ids, labels=ids).loss.backward()
    autopar.average_gradients(half)
    for error, instead, call in [
        (autopar.ConfigError, r"model\.execute_pipeline\(batch, optimizer=optimizer\)", lambda: staged(ids)),
        (autopar.ConfigError, "Leave it out", lambda: staged.eval()(ids, output_hidden_states=True)),
        (
            autopar.ConfigError,
            r"autopar\.initialize\(model, config, optimizer=optimizer\)",
            lambda: autopar.initialize(gpt2(), {"zero": {"stage": 1}, "gradient_clipping": 1.0}),
        ),
        (autopar.ConsistencyError, r"autopar\.average_gradients\(model\)", optimizer.step),
        (autopar.ConfigError, r"optimizer\.scale_loss\(loss\)\.backward\(\)", half_optimizer.step),
        (autopar.ConfigError, r"then step\(\) without a closure", lambda: optimizer.step(lambda: 0.0)),
        (autopar.ConfigError, "gradient_clipping into the config", lambda: autopar.clip_grad_norm_(half, 1.0)),
    ]:
        with pytest.raises(error, match=instead):
            call()
    autopar.average_gradients(replica)
    optimizer.step()
