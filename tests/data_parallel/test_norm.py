"""The gradient norm over stages, and clipping inside of the optimizer's step."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.data_parallel.gradients import counted_here, tensor_norm
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from autopar.tensor_parallel import parallelize
from autopar.tensor_parallel.regions import Region
from tests.compare import same_weights
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama


def grouped():
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=True)


STAGES = {  # what each of two stages holds: the tied weight lies on both, under two names
    gpt2: (
        ("transformer.wte.", "transformer.wpe.", "transformer.h.0."),
        ("transformer.h.1.", "transformer.ln_f.", "lm_head."),
    ),
    grouped: (("model.embed_tokens.", "model.layers.0."), ("model.layers.1.", "model.norm.", "lm_head.")),
}


def check_stages(tp):
    for build, stages in STAGES.items():
        model = build()
        model(**language_batches(131)[0]).loss.backward()
        mpu = autopar.MPU(tp, 2)
        plan = make_plan(model, find_policy(model), tp)
        norms = {
            p: torch.nn.utils.get_total_norm([x.grad for x in model.parameters()], p) for p in (2.0, 1.0, math.inf)
        }
        parallelize.apply(model, plan, mpu.tp, Region(mpu.tp))
        everything = dict(model.named_parameters(remove_duplicate=False))
        mine = {n: p for n, p in everything.items() if n.startswith(stages[mpu.pp.rank])}
        counted = counted_here(mine, plan, mpu)
        tied = plan.canonical("lm_head.weight")
        assert tied in {plan.canonical(name) for name in mine}
        assert (tied in counted) == (mpu.pp.rank == 0)
        for p, expected in norms.items():
            gradients = {name: q.grad for name, q in mine.items() if q.grad is not None}
            norm = tensor_norm(gradients, plan, mpu, counted, p, mine.values())
            close(norm, expected, f"norm of order {p}")
            everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, norm)
            assert len({value.item() for value in everyone}) == 1
        mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_two_stages_of_two_ranks():
    check_stages(2)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_clipping_in_the_config_is_the_plain_models():
    for build in (gpt2, grouped):
        for stage in (0, 1):
            plain = build()
            model = copy.deepcopy(plain)
            optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain))
            config = {
                "model_parallelism": {"tensor_parallel_size": 2},
                "gradient_clipping": 0.5,
                "zero": {"stage": stage},
            }
            model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
            assert optimizer.gradient_norm is None
            engine = DistributedDataParallel(model, process_group=model.mpu.dp.group)
            for batch in language_batches(131, count=4):
                mine = {name: tensor[model.mpu.dp.rank :: 2] for name, tensor in batch.items()}
                full = dict(batch, labels=batch["input_ids"])
                mine["labels"] = mine["input_ids"]
                engine(**mine).loss.backward()
                # the mean of the replicas' losses, as data parallelism has it
                (sum(plain(**{n: t[d::2] for n, t in full.items()}).loss for d in range(2)) / 2).backward()
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                assert norm > 0.5
                for o in (optimizer, reference):
                    o.step()
                    o.zero_grad()
                close(optimizer.gradient_norm, norm, "norm", 2e-5)
            same_weights(model, plain, 2e-5)


@pooled(world_size=2)
def test_clipped_gradients_are_seen_after_the_step_and_others_stay():
    plain = gpt2()
    for limit in (0.25, 1e9):
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = autopar.initialize(
            model, {"model_parallelism": {"tensor_parallel_size": 2}, "gradient_clipping": limit}, optimizer=optimizer
        )
        model(**language_batches(131)[0]).loss.backward()
        before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        factor = min(1.0, limit / optimizer.gradient_norm.item())
        assert (factor < 1) == (limit == 0.25)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            close(parameter.grad, gradient * factor, "clipped gradient")
