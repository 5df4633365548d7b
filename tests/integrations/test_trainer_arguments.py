"""What a parallel trainer takes and refuses: precision, sizes, models that are parallelized already, arguments."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import Trainer

import autopar
from autopar.errors import ConfigError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.integrations.runs import arguments, collate, history, launched, metrics, samples
from tests.integrations.test_trainer import trainer_of
from tests.scripts import printed
from tests.small import llama

pytest.importorskip("accelerate")


def losses(trainer):
    trainer.train()
    return torch.tensor(history(trainer))


@pooled(world_size=1)
def half_on_one_process(folder, dtype):
    with launched():
        trainer = trainer_of(folder, 1, **{dtype: True})
        torch.save([losses(trainer), trainer.evaluate()["eval_loss"]], folder / f"{dtype}.pt")


@pooled(world_size=4)
def half_on_four_ranks(folder, dtype, pp):
    """``args.bf16`` and ``args.fp16`` are the config's precision; clipped by the norm that is logged."""
    with launched():
        trainer = trainer_of(folder, 2, pp, **{dtype: True}, parallel={"zero": {"stage": 1}})
        assert trainer.model._autopar.config.precision == dtype
        mine = losses(trainer)
        expected, evaluated = torch.load(folder / f"{dtype}.pt")
        torch.testing.assert_close(mine, expected, rtol=3e-2 if dtype == "bf16" else 5e-3, atol=1e-3)
        assert abs(trainer.evaluate()["eval_loss"] - evaluated) < 3e-2
        assert trainer.model.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        assert trainer.optimizer.optimizer.skipped_steps == 0


@pytest.mark.tier("all")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(tmp_path, dtype):
    half_on_one_process(tmp_path, dtype)
    half_on_four_ranks(tmp_path, dtype, 1 if dtype == "bf16" else 2)


@pooled(world_size=2)
def test_fp16_skips_a_step_that_overflows(tmp_path):
    with launched():
        scale = {"precision": {"dtype": "fp16", "initial_scale": 2.0**24, "hysteresis": 1}}
        trainer = trainer_of(tmp_path, 2, fp16=True, parallel=scale, save_strategy="steps", save_steps=6)
        trainer.train()
        inner = trainer.optimizer.optimizer
        assert inner.skipped_steps > 0
        assert trainer.lr_scheduler.last_epoch == 6 - inner.skipped_steps
        again = trainer_of(tmp_path, 2, fp16=True, parallel=scale, max_steps=7)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        assert again.optimizer.optimizer.loss_scale == inner.loss_scale < 2.0**24


@pooled(world_size=2)
def test_a_model_that_is_parallelized_already(tmp_path):
    with launched():
        from autopar.integrations import ParallelTrainer

        given = trainer_of(tmp_path, 2)
        model = autopar.initialize(llama(), {"tp": 2})
        both = {"train_dataset": samples(40), "data_collator": collate, "args": arguments(tmp_path, 1)}
        trainer = ParallelTrainer(model, **both)
        assert trainer.label_names == given.label_names == ["labels"]
        assert trainer.model_accepts_loss_kwargs
        assert torch.equal(losses(trainer), losses(given))
        with raises_everywhere(ConfigError, "is already parallelized", "Remove parallel_config"):
            ParallelTrainer(model, **both, parallel_config={"tp": 2})
        other, plain = llama(), arguments(tmp_path, 1)
        optimizer = torch.optim.AdamW(other.parameters())
        other, optimizer = autopar.initialize(other, {"tp": 2, "zero": {"stage": 1}}, optimizer=optimizer)
        with raises_everywhere(ConfigError, "together with an optimizer", "optimizers=(optimizer, None)"):
            ParallelTrainer(other, plain)
        with raises_everywhere(ConfigError, "args request bf16", "precision.dtype=fp32"):
            ParallelTrainer(other, arguments(tmp_path, 1, bf16=True), optimizers=(optimizer, None))
        stepped = ParallelTrainer(other, **both, optimizers=(optimizer, None))
        assert len(losses(stepped)) == 6


@pooled(world_size=4)
def test_the_plain_trainer_evaluates_and_names_this_one_to_train(tmp_path):
    rows = samples(21, 1)
    batch = collate(rows)
    with torch.no_grad():
        predicted = SimpleNamespace(predictions=llama().eval()(**batch).logits, label_ids=batch["labels"].numpy())
    with launched():
        model = autopar.initialize(llama(), {"tp": 2})
        settings = arguments(tmp_path, 2)
        trainer = Trainer(model, settings, collate, train_dataset=samples(8), compute_metrics=metrics)
        found = trainer.evaluate(rows)
        for name, expected in metrics(predicted).items():
            assert abs(found[f"eval_{name}"] - expected) < 1e-5, name
        with raises_everywhere(
            ConfigError, "DistributedDataParallel over ranks [0, 1, 2, 3]", "ParallelTrainer(model="
        ):
            trainer.train()


@pooled(world_size=4)
def test_sizes_of_accelerate(tmp_path):
    with launched():
        from accelerate import ParallelismConfig

        from autopar.integrations import ParallelTrainer
        from autopar.integrations.trainer.arguments import parse_parallel_config

        args = arguments(tmp_path, 2, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))
        trainer = ParallelTrainer(llama(), args)
        assert trainer.mpu.sizes == (2, 1, 2, 1)
        assert trainer.model._autopar.config.zero_stage == 3
        context = parse_parallel_config(ParallelismConfig(tp_size=2, cp_size=2), arguments(tmp_path, 2), 4)
        assert (context.tensor_parallel_size, context.context_parallel_size) == (2, 2)
        ulysses = parse_parallel_config(ParallelismConfig(sp_size=4), arguments(tmp_path, 2), 4)
        assert (ulysses.context_parallel_size, ulysses.context_parallel_method) == (4, "ulysses")
        hybrid = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        sharded = parse_parallel_config(hybrid, arguments(tmp_path, 2), 4)
        assert (sharded.zero_stage, sharded.zero_shard_size) == (3, 2)
        with raises_everywhere(ConfigError, "= 2 must equal the world size 4"):
            ParallelTrainer(llama(), arguments(tmp_path, 2), parallel_config=ParallelismConfig(tp_size=2))
        with raises_everywhere(ConfigError, "are both given"):
            ParallelTrainer(llama(), args, parallel_config={"tp": 2})


DATA = yaml.safe_load(Path(__file__).with_name("refused_arguments.yaml").read_text())


@pooled(world_size=2)
def test_what_is_refused(tmp_path):
    with launched():
        from autopar.integrations import ParallelTrainer

        for text, changes in DATA["refused"].items():
            model = llama()
            with raises_everywhere(ConfigError, text):
                trainer_of(tmp_path, 2, model=model, **changes).train()
            assert "_autopar" not in vars(model)
        model = llama()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        with raises_everywhere(ConfigError, "Muon depends on full matrices"):
            ParallelTrainer(
                model,
                arguments(tmp_path, 1),
                parallel_config={"tp": 2, "zero": {"stage": 3}},
                optimizers=(torch.optim.Muon(matrices), None),
            )
        for text, changes in DATA["in_stages"].items():
            with raises_everywhere(ConfigError, text, "Use tensor parallelism"):
                trainer_of(tmp_path, 1, 2, **changes)
        for name, value, texts in (
            ("hf_device_map", {"": "cpu"}, ("device_map",)),
            ("peft_config", {}, ("LlamaForCausalLM has adapters of PEFT without a PeftModel", "get_peft_model")),
        ):
            setattr(model := llama(), name, value)
            with raises_everywhere(ConfigError, *texts):
                trainer_of(tmp_path, 2, model=model)
        for name in ("fsdp", "deepspeed", "use_liger_kernel"):
            args = arguments(tmp_path, 1)
            setattr(args, name, True)
            with raises_everywhere(ConfigError, f"args.{name}"):
                ParallelTrainer(llama(), args, parallel_config={"tp": 2})
        with raises_everywhere(ConfigError, "model_init="):
            ParallelTrainer(model_init=llama, args=arguments(tmp_path, 1), parallel_config={"tp": 2})
        with raises_everywhere(ConfigError, "does not divide"):
            trainer_of(tmp_path, 3)
        trainer = trainer_of(tmp_path, 2)
        with raises_everywhere(ConfigError, "must get all parameters of a parallelized model, got 1"):
            some = list(trainer.model.parameters())
            for parameter in some:
                parameter.grad = torch.ones_like(parameter)
            trainer.accelerator.clip_grad_norm_(some[0], 1.0)


@pooled(world_size=2)
def test_a_loop_that_uses_the_accelerator(tmp_path):
    with launched():
        trainer = trainer_of(tmp_path, 2)
        accelerator = trainer.accelerator
        assert accelerator.num_processes == 1
        assert accelerator.process_index == dist.get_rank()
        assert accelerator.is_main_process == (dist.get_rank() == 0)
        assert accelerator.gather({"x": torch.tensor(3)})["x"].tolist() == [3]
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = accelerator.clip_grad_norm_(trainer.model.parameters(), float("inf"))
        assert abs(norm.item() - sum(p.numel() for p in llama().parameters()) ** 0.5) < 1e-3


def test_the_package_alone_imports_none_of_it():
    code = (
        "import sys, autopar, autopar.integrations; dir(autopar.integrations)\n"
        "assert not {'accelerate', 'transformers.trainer', 'trl'} & set(sys.modules)"
    )
    assert printed("-c", code) == ""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="counts processes by their GPUs")
@pooled(world_size=2)
def test_without_a_gpu_the_arguments_need_use_cpu(tmp_path):
    with (
        launched(),
        raises_everywhere(
            ConfigError,
            "TrainingArguments count 1 processes, expected 2, because this machine has no GPU\n"
            "  Write TrainingArguments(use_cpu=True).",
        ),
    ):
        trainer_of(tmp_path, 2, use_cpu=False)
