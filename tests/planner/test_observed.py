"""``summary``, ``metrics`` and the log line of a parallelized model."""

import copy
import itertools
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.errors import ConfigError
from autopar.plan.plan import summarise
from autopar.tools import plot
from autopar.tools.planner.hardware import gpu_of
from tests.harness.worlds import pooled
from tests.scripts import python
from tests.small import gpt2, llama, parallel

DEVICES = yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text())
IDS = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(1))


def _flops_of_a_step() -> int:
    """Of the plain model: products as torch counts them, and the causal half of its attention, which torch does not."""
    with FlopCounterMode(display=False) as counter:
        llama()(input_ids=IDS, labels=IDS, use_cache=False)
    assert [str(op) for op in counter.get_flop_counts()["Global"]] == ["aten.mm"]
    layers, heads, width, (samples, rows) = 2, 6, 4, IDS.shape
    attention = layers * 2 * samples * heads * rows * rows * (width + width) // 2
    return 3 * (counter.get_total_flops() + attention)


@pooled(world_size=2)
def test_metrics_count_the_operations_of_the_plain_model() -> None:
    model = parallel(llama(), 2)
    expected = _flops_of_a_step()
    found = autopar.metrics(model, {"input_ids": IDS}, 2.0, gpu="h100")
    assert found["flops"] == expected
    assert found["tokens_per_second"] == 16 and found["tokens_per_second_per_gpu"] == 8
    assert found["mfu"] == expected / 2.0 / 2 / 67e12
    assert autopar.metrics(model, {"input_ids": IDS}, 2.0)["mfu"] is None or torch.cuda.is_available()
    with pytest.raises(ConfigError, match="seconds must be above 0, not 0"):
        autopar.metrics(model, {"input_ids": IDS}, 0)
    with pytest.raises(ConfigError, match=r"must have input_ids \[batch, sequence\]; got labels"):
        autopar.metrics(model, {"labels": IDS}, 1)


@pooled(world_size=2)
def test_a_run_is_logged_by_one_rank_and_drawn(tmp_path: Path) -> None:
    model, logged, file = parallel(llama(), 2), [], tmp_path / "runs" / "run.csv"
    board, wandb = Mock(spec=["add_scalar"]), Mock(spec=["log", "step"])
    for step, log in itertools.product(range(3), (file, logged.append, board, wandb)):
        loss = None if step == 1 else 3.0 - step
        autopar.metrics(model, {"input_ids": IDS}, 0.5, log=log, step=step, loss=loss)
    dist.barrier()
    first = model.mpu.rank == 0
    assert [row.get("loss") for row in logged] == ([3.0, None, 1.0] if first else [])
    losses = [call.args for call in board.add_scalar.call_args_list if call.args[0] == "loss"]
    assert losses == ([("loss", 3.0, 0), ("loss", 1.0, 2)] if first else [])
    assert [call.args[0] for call in wandb.log.call_args_list] == logged
    assert plot.read(file)["step"] == [0, 1, 2] and plot.read(file)["tokens_per_second"] == [64] * 3
    assert plot._points(plot.read(file), "loss") == [(0, 3), (2, 1)]
    picture = tmp_path / f"run{model.mpu.rank}.svg"
    plot.main([str(file), "-o", str(picture)])
    assert "<svg" in picture.read_text()
    with pytest.raises(SystemExit, match=r"error: .*none\.csv"):
        plot.main([str(tmp_path / "none.csv")])
    if model.mpu.rank == 0:
        with pytest.raises(ConfigError, match=r"has the columns \['step', 'loss'.*Use another file"):
            autopar.metrics(model, {"input_ids": IDS}, 1.0, log=file)
        with pytest.raises(ConfigError, match=r"log must be a CSV file, .* or a function; got int"):
            autopar.metrics(model, {"input_ids": IDS}, 1.0, log=3)


@pooled(world_size=2)
def test_summary_says_what_this_rank_holds() -> None:
    model = parallel(llama(), 2)
    text = autopar.summary(model)
    rank = model.mpu.rank
    assert "llama by policy llama; tp 2 x pp 1 x dp 1" in text
    [row] = [line for line in text.splitlines() if line.strip().startswith("model.layers.0-1.self_attn.q_proj.weight")]
    held = 16 if rank == 0 else 8  # 3 KV heads: two and one, each with its two query heads of width 4
    assert row.split()[1:] == ["24", "x", "24", "column", "heads", str(held), "x", "24", "float32"]
    size = sum(p.nbytes for p in model.parameters())
    assert text.splitlines()[-1].endswith(f"{size / 1e6:,.1f} MB")
    model.mpu.destroy()
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not parallelized"):
        autopar.summary(llama())
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not parallelized"):
        autopar.metrics(llama(), {"input_ids": IDS}, 1.0)


@pytest.mark.parametrize(("device", "name"), DEVICES.items())
def test_a_gpu_is_known_by_the_name_of_its_device(device: str, name: str | None) -> None:
    found = gpu_of(device)
    assert (found and found.name) == name


def test_context_parallelism_is_named_where_there_is_some() -> None:
    line = summarise(gpt2(), 10, (2, 1, 3, 4), "cpu", "gpt2.yaml:2")
    assert line.startswith("GPT2LMHeadModel by gpt2.yaml:2: tp 2 x cp 4 x pp 1 x dp 3 on cpu; 10 parameters, this rank")


@pooled(world_size=2)
def test_one_line_on_rank_0() -> None:
    lines, handler, log = list[str](), logging.Handler(), logging.getLogger("autopar")
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    plain = gpt2()
    model = parallel(gpt2(), 2)
    held = sum(parameter.numel() for parameter in model.parameters())
    line = (
        f"INFO GPT2LMHeadModel by gpt2.yaml:2: tp 2 x pp 1 x dp 1 on cpu; {plain.num_parameters():,} parameters, this "
        f"rank holds {held:,} ({4 * held / 1e6:,.1f} MB)"
    )
    assert lines == ([line] if dist.get_rank() == 0 else [])
    assert model.num_parameters() == plain.num_parameters() > held  # the whole model's
    assert model.get_memory_footprint(return_buffers=False) == 4 * held  # this rank's
    assert "full model" in model.num_parameters.__doc__


@pytest.mark.tier("all")
def test_the_line_is_printed_where_no_logging_is_set_up() -> None:
    done = python("-c", "import autopar; from tests.small import gpt2; autopar.initialize(gpt2(), {})")
    assert done.stderr.startswith("autopar: GPT2LMHeadModel by gpt2.yaml:2: tp 1 x pp 1 x dp 1 on cpu;"), done.stderr


@pooled(world_size=2)
def test_printed_layers_have_local_and_whole_sizes() -> None:
    rank = dist.get_rank()
    plain = gpt2()
    before = repr(plain)
    model = parallel(plain, 2)
    width = 60 if rank == 0 else 48  # 5 of 9 heads, 4 of 9
    for one in (model, copy.deepcopy(model)):
        text = repr(one)
        assert (
            f"(c_attn): ColumnParallelConv1D(tp {rank}/2: weight [36, {width}] of [36, 108], bias [{width}] of [108])"
            in text
        )
        assert f"(c_proj): RowParallelConv1D(tp {rank}/2: weight [{width // 3}, 36] of [36, 36])" in text
        assert f"VocabParallelEmbedding(131, 36; tp {rank}/2: weight [{66 - rank}, 36] of [131, 36])" in text
    assert repr(autopar.deparallelize(model)) == before
    text = repr(parallel(llama(num_attention_heads=4, num_key_value_heads=2), 2))
    shown = "in_features=24, out_features=12, bias=False"
    assert f"(q_proj): ColumnParallelLinear({shown}; tp {rank}/2: weight [12, 24] of [24, 24])" in text
