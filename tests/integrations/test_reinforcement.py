"""TRL's trainers that sample completions, with a parallelized model, against themselves on plain processes."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import ConfigError, ConsistencyError
from tests.exchange import everyones, raises_everywhere
from tests.fetched_packages import with_package
from tests.harness.tiers import mainly
from tests.integrations import trl_runs
from tests.integrations.runs import launched
from tests.integrations.trl_runs import compare, config, data, even_words, history, lora, save_model, trainer_of

pytest.importorskip("accelerate")


def adapted() -> dict[str, Any]:
    targets = ["q_proj", "o_proj", "down_proj"]
    return {"beta": 0.1, "peft_config": lora(target_modules=targets, init_lora_weights=False)}


def judged() -> dict[str, Any]:
    functions, tokenizers = [trl_runs.judge(), even_words], [trl_runs.tokenizer(), None]
    return {"reward_funcs": functions, "reward_processing_classes": tokenizers}


# name -> trainer, keys of parallel_config, arguments (those that tests/integrations/trl_runs.py adds are not here)
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "grpo": ("GRPO", {}, {}),
    "reference": ("GRPO", {}, {"beta": 0.1, "loss_type": "grpo", "num_iterations": 2, "steps_per_generation": 4}),
    "adapters": ("GRPO", {}, adapted),
    "rloo": ("RLOO", {}, {"beta": 0.05}),
    "judge": ("GRPO", {}, judged),
    "following": ("GRPO", {}, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    "recomputed": ("GRPO", {}, {"beta": 0.1, "gradient_checkpointing": True}),
    "sharded-optimizer": ("GRPO", {"zero": {"stage": 1}}, {}),
    "sharded-weights": ("GRPO", {"zero": {"stage": 3}}, {}),
    "entropy": ("GRPO", {}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.01}),
    "controlled": ("GRPO", {}, {"use_adaptive_entropy": True, "entropy_target": 4.7}),
    "groups": ("GRPO", {}, {"steps_per_generation": 1, "num_generations": 4, "scale_rewards": "batch"}),
    "filled-up": ("GRPO", {}, lambda: {"eval_dataset": data("GRPO", 7), "mask_truncated_completions": True}),
    "online-dpo": ("OnlineDPO", {}, {}),
    **{
        kind: ("GRPO", {}, {"loss_type": kind, "num_iterations": 2})
        for kind in ("bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
    },
}
RUNS = {
    "main": ["grpo", "reference"],
    "rewards": ["adapters", "rloo", "judge", "following", "online-dpo", "filled-up"],
    "memory": ["recomputed", "sharded-optimizer", "sharded-weights"],
    "losses": ["entropy", "controlled", "groups", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"],
}


def run(folder, names, base, tp=None):
    for name in names:
        kind, keys, changes = CASES[name]
        changes = changes() if callable(changes) else changes
        with launched():
            trainer = trainer_of(kind, folder, None if tp is None else config(tp, **keys), **changes)
            compare(trainer, folder / f"{name}-{base}.json")


@with_package("trl", world_size=1)
def on_one_process(folder, names):
    run(folder, names, 1)


@with_package("trl", world_size=2)
def on_two_processes(folder, names):
    run(folder, names, 2)


@with_package("trl", world_size=2)
def on_two_ranks(folder, names):
    run(folder, names, 1, 2)


@with_package("trl", world_size=4)
def on_four_ranks(folder, names):
    run(folder, names, 2, 2)


@pytest.mark.tier("test")
@pytest.mark.parametrize("which", mainly(*RUNS, later="sweep"))
def test_tensor_parallel_ranks_sample_as_one_process_does(tmp_path, which):
    save_model(tmp_path)
    on_one_process(tmp_path, RUNS[which])
    on_two_ranks(tmp_path, RUNS[which])


@pytest.mark.tier("all")
@pytest.mark.parametrize("which", mainly(*RUNS, later="sweep"))
def test_two_replicas_sample_as_two_processes_do(tmp_path, which):
    save_model(tmp_path)
    on_two_processes(tmp_path, RUNS[which])
    on_four_ranks(tmp_path, RUNS[which])


def lucky(completions, **others):
    """Rewards that every process draws for itself."""
    return [float(byte) for byte in os.urandom(len(completions))]


def of_ranks(kind):
    """Make a trainer that slices what it has gathered by the rank in the world."""
    import trl

    class Sliced(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            rank = {"args": self.args.process_index, "torch": dist.get_rank()}[kind]
            every = self.accelerator.gather(made["advantages"])
            made["advantages"] = every[rank * len(inputs) : (rank + 1) * len(inputs)]
            return made

    return Sliced


@with_package("trl", world_size=2)
def on_two_ranks_of_a_replica(folder):
    with launched():
        trainer = trainer_of("GRPO", folder, config(2), reward_funcs=lucky)
        trainer.train()
        one, other = everyones(history(trainer))
        assert one == other
        for kind in ("args", "torch"):
            words = "ParallelGRPOTrainer's batch has different advantages on the ranks of a replica"
            with raises_everywhere(ConsistencyError, words):
                trainer_of("GRPO", folder, config(2), plain=of_ranks(kind)).train()
        refused(folder)
        trainer = trainer_of("GRPO", folder, config(2), bf16=True, beta=0.1)
        trainer.train()
        weights = [*trainer.model.parameters(), *trainer.ref_model.parameters()]
        assert {weight.dtype for weight in weights} == {torch.bfloat16}
        assert history(trainer)[0]["kl"] == 0.0  # the reference rounds as the model does
        resumed(folder)


def refused(folder):
    tp, cp, pp = (f"{name}_parallel_size" for name in ("tensor", "context", "pipeline"))
    fully = config(2, zero={"stage": 3})
    for words, parallel, changes in (
        ("args.use_vllm is not supported, since vLLM would get local shards", config(2), {"use_vllm": True}),
        ("ParallelGRPOTrainer.compute_loss is not supported with", {"model_parallelism": {tp: 1, pp: 2}}, {}),
        ("context_parallel_size is not supported with a trainer of TRL", {"model_parallelism": {tp: 1, cp: 2}}, {}),
        ("sequence_parallel is not supported with", {"model_parallelism": {tp: 2, "sequence_parallel": True}}, {}),
        ("args.sync_ref_model is not supported with zero: {stage: 3}", fully, {"beta": 0.1, "sync_ref_model": True}),
        (
            "per_device_train_batch_size=1 x 1 replicas = 1 samples must be divisible by the 2 completions of each",
            config(2),
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        ),
    ):
        with raises_everywhere(ConfigError, words):
            trainer_of("GRPO", folder, parallel, **changes)


def resumed(folder):
    """Training goes on from a checkpoint with the same completions, and the same controller of the entropy."""
    changes: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_target": 4.7, "eval_strategy": "no"}
    whole = trainer_of("GRPO", folder, config(2), **changes, save_strategy="steps", save_steps=2)
    whole.train()
    part = trainer_of("GRPO", folder, config(2), **changes, save_strategy="steps", save_steps=2)
    part.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    assert history(part)[:-1] == history(whole)[:-1]  # the last row is a sum over the steps of this call
    assert part.entropy_coef == whole.entropy_coef


@pytest.mark.tier("all")
def test_ranks_of_a_replica(tmp_path):
    save_model(tmp_path)
    on_two_ranks_of_a_replica(tmp_path)


def arguments(**changes):
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_generations": 8, "world_size": 4}
    more = {"generation_batch_size": 32, "eval_strategy": "no", "per_device_eval_batch_size": 4}
    return SimpleNamespace(**{**sizes, **more, **changes})


def test_numbers_of_samples_count_replicas():
    from autopar.integrations.trainer.replica_view import count_replicas

    args = arguments()
    for _ in range(2):  # arguments that a second trainer gets
        count_replicas(args, 2)
        assert args.generation_batch_size == 16
    args = arguments(generation_batch_size=8)  # of one process, as GOLD counts
    count_replicas(args, 2)
    assert args.generation_batch_size == 8
    words = "per_device_train_batch_size=4 x 1 replicas x 2 steps_per_generation = 8 samples must be divisible"
    with pytest.raises(ConfigError, match=words):
        count_replicas(arguments(num_generations=16), 1)
    with pytest.raises(ConfigError, match="per_device_eval_batch_size=4 x 1 replicas = 4 samples must be divisible"):
        count_replicas(arguments(eval_strategy="steps"), 1)


def test_names_of_trainers():
    from autopar import integrations
    from autopar.integrations.trainer import trainers

    assert set(trainers.NAMES) <= set(integrations.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'ParallelPPOTrainer'"):
        _ = trainers.ParallelPPOTrainer
