"""Logits that stay sharded until somebody reads them: the plain model's values and gradients, whatever is done."""

import copy
import gc
import math
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import LabelSmoother

import autopar
from autopar.distributed import agree
from autopar.errors import ConfigError, ConsistencyError
from autopar.tensor_parallel import regions, sharded_logits
from autopar.tensor_parallel.sharded_logits import ShardedLogits
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.random_models import small
from tests.small import gpt2, llama, parallel

VOCAB = 131
MASK = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0, 1]]).bool()


def shifted(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), **options)


def changed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    later = logits[..., :-1, :]
    logits /= 2.0  # the view sees it
    return F.cross_entropy(later.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def changed_view(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    later = logits[:, 1:]
    later *= 0.5
    later[:, 0] = 0.25
    return logits.square().mean() + shifted(logits, labels)


class Double(torch.autograd.Function):
    """A user's own function, which no ``__torch_function__`` sees coming."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


# What users do with logits and labels [2, 7].
FROM_SHARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "shifted": shifted,
    "smoothed sum": lambda x, y: shifted(x, y, label_smoothing=0.2, reduction="sum"),
    "each token": lambda x, y: shifted(x, y, reduction="none", ignore_index=3).square().mean() / 10,
    "masked": lambda x, y: F.cross_entropy(x[MASK], y[MASK]),
    "capped": lambda x, y: shifted(torch.tanh(x.float() / 3.0) * 3.0, y),
    "one token": lambda x, y: F.cross_entropy(x[0, -1], y[0, -1]),
    "last": lambda x, y: F.cross_entropy(x[:, -1, :], y[:, -1]),
    "biased": lambda x, y: shifted(x + torch.linspace(-1, 1, VOCAB), y),
    "tempered": lambda x, y: shifted(x / torch.tensor([[[2.0]], [[0.5]]]) - 1.0, y),
    "double": lambda x, y: shifted(x.to(torch.float64), y).float(),
    "module": lambda x, y: torch.nn.CrossEntropyLoss(ignore_index=5)(x.view(-1, VOCAB), y.view(-1)),
    "a copy": lambda x, y: shifted(x.clone().contiguous(), y),
}
GATHERED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "squares": lambda x, y: x.square().mean(),
    "joined": lambda x, y: F.cross_entropy(torch.cat([x[0], 2 * x[1]]), y.view(-1)),
    "both": lambda x, y: x.float().logsumexp(-1).mean() + shifted(x, y),
    "probabilities": lambda x, y: x.softmax(-1)[..., 7].sum(),
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "weighted": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1), weight=torch.linspace(0, 1, VOCAB)),
    "targets as probabilities": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), F.one_hot(y.view(-1), VOCAB).float()),
    "in place": changed,
    "a view in place": changed_view,
    "a function": lambda x, y: shifted(Double.apply(x), y),
    "rows": lambda x, y: sum(row.logsumexp(-1).mean() for row in x),
    "label smoother": lambda x, y: LabelSmoother(0.1)({"logits": x}, y, shift_labels=True),
    "some columns": lambda x, y: x[..., :40].square().mean() + x[:, 1, 3:9].mean(),
    "two logits": lambda x, y: (x * x.detach()).mean(),
    "numpy": lambda x, y: x.mean() * float(x.detach().numpy()[0, 0, 0]),
}


class Gathered:
    """Counts how often logits are gathered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, meet = 0, sharded_logits.meet

        def counted(*arguments: Any) -> None:
            self.times += 1
            meet(*arguments)

        monkeypatch.setattr(sharded_logits, "meet", counted)


def compare(table: dict[str, Callable[..., Any]], build: Any, chunk: int, gathered: Gathered | None = None) -> None:
    """Compare what is computed of logits, and gradients of two micro-batches, with the plain model."""
    ids = labels = language_batches(VOCAB, count=1)[0]["input_ids"]
    plain = build()
    model = parallel(copy.deepcopy(plain), 2, loss={"chunk": chunk})
    for name, compute in table.items():
        plain.zero_grad(), model.zero_grad()
        for scale in (1.0, 0.3):
            before = gathered.times if gathered else 0
            expected, logits = compute(plain(ids).logits, labels), model(ids).logits
            assert isinstance(logits, ShardedLogits)
            actual = compute(logits, labels)
            assert gathered is None or (gathered.times > before) == (name in GATHERED), name
            close(actual, expected, name)
            (scale * expected).backward()
            (scale * actual).backward()
        same_gradients(model, plain, 2e-5, name)


@pytest.mark.tier("test")
@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.tier("all")), 3])
@pooled(world_size=2)
def test_whatever_is_computed_of_them(chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gathered = Gathered(patch)
        for build in (gpt2, llama) if chunk == 0 else (llama,):
            compare({**FROM_SHARDS, **GATHERED}, build, chunk, gathered)


@pooled(world_size=2)
def test_no_loss_of_transformers_gathers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        gathered = Gathered(patch)
        for plain in (
            small("bert", "BertForMaskedLM"),
            small("t5", "T5ForConditionalGeneration"),
            small("bart", "BartForConditionalGeneration"),
            small("gemma2", "Gemma2ForCausalLM", final_logit_softcapping=3.0),
            small("cohere", "CohereForCausalLM"),
        ):
            model = parallel(copy.deepcopy(plain), 2)
            for batch in language_batches(VOCAB):
                name = type(plain).__name__
                batch["labels"][0, :2] = -100
                outputs = model(**batch), plain(**batch)
                close(outputs[0].loss, outputs[1].loss, name)
                for output in outputs:
                    output.loss.backward()
                with torch.no_grad():  # an evaluation
                    close(model(**batch).loss, outputs[1].loss, name)
            same_gradients(model, plain, 2e-5, name)
        assert gathered.times == 0


@pooled(world_size=2)
def test_they_are_the_outputs_users_know() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    plain = llama()
    expected = plain(**batch).logits
    model = parallel(copy.deepcopy(plain), 2)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.detach() * 1.0))
    for read in (
        lambda: model(**batch).logits,
        lambda: model(**batch)["logits"],
        lambda: model(**batch)[1],
        lambda: model(**batch).to_tuple()[1],
        lambda: model(**batch, return_dict=False)[1],
        lambda: seen[-1],
        lambda: copy.deepcopy(model(**batch).logits.detach()),
    ):
        logits = read()
        facts = (logits.shape, logits.dtype, logits.device, len(logits), logits.ndim, logits.is_floating_point())
        assert facts == (expected.shape, expected.dtype, expected.device, 2, 3, True)
        close(logits.tolist() and torch.tensor(logits.tolist()), expected, "logits")
    hook.remove()
    logits = model(batch["input_ids"], batch["attention_mask"], logits_to_keep=2).logits
    close(logits + 0, expected[:, -2:], "the last two")
    held = "0 to 65" if dist.get_rank() == 0 else "66 to 130"
    assert repr(logits) == (
        f"ShardedLogits([2, 2, 131], torch.float32: tp rank {dist.get_rank()} of 2 has columns {held})"
    )
    with torch.no_grad():
        assert type(model(batch["input_ids"]).logits) is torch.Tensor  # no loss in sight: gathered at once
    assert type(autopar.deparallelize(model)(**batch).logits) is torch.Tensor
    always = parallel(llama(), 2, loss={"gather_logits": "always"})
    output = always(**batch)
    assert type(output.logits) is torch.Tensor
    close(output.loss, plain(**batch).loss, "loss")
    output.logits.retain_grad()
    F.cross_entropy(output.logits.view(-1, VOCAB), batch["labels"].view(-1)).backward()
    assert output.logits.grad is not None


@pooled(world_size=2)
def test_nothing_is_kept_alive() -> None:
    model = parallel(gpt2(), 2)
    ids = torch.arange(6)[None]
    gc.collect()
    gc.disable()
    try:
        for read in (lambda x: x, lambda x: x[:, :-1], lambda x: x.square(), lambda x: x[0].mul_(2)):
            output = model(ids, labels=ids)
            held = [weakref.ref(output.logits), weakref.ref(output.logits.part.rows)]
            result = read(output.logits)
            del output, result
            assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_rank_that_reads_alone_gets_an_error() -> None:
    rank = dist.get_rank()
    ids = torch.arange(6)[None]
    model = parallel(gpt2(), 2, loss={"read_timeout": 0.8})
    output = model(ids, labels=ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "_WARN_AFTER", 0.3)
        if rank == 0:
            start = time.monotonic()
            line = sys._getframe().f_lineno + 2
            with pytest.warns(autopar.ShardWarning) as warned, pytest.raises(ConsistencyError) as error:
                output.logits.argmax(-1)
            assert 0.8 <= time.monotonic() - start < 2.0
            begin = f"rank 0 reads logits [1, 6, 131] of forward 1 of model {model.lm_head.region.model}"
            begin += f" in {__file__}:{line}, and rank 1 did not within "
            end = (
                "\n  Reading logits gathers them, so every tensor-parallel rank must read them: put `if rank == 0:` "
                "around the\n  print, not around the read (logits.argmax(-1), logits.cpu()). Or gather them in the "
                "forward: under\n  torch.no_grad(), or always with loss: {gather_logits: always}. "
                "loss: {read_timeout: ...} waits longer."
            )
            assert str(error.value) == f"{begin}0.8 s.{end}"
            assert [str(each.message) for each in warned] == [f"{begin}0.3 s: after 0.8 s it raises.{end}"]
            assert (warned[0].filename, warned[0].lineno) == (__file__, line)
            print(output.logits)  # says what it is; no collective
    dist.barrier()
    later = model(ids, labels=ids)
    with pytest.raises(ConsistencyError, match=r"0 reads .* of forward 1 of model \d+; rank 1 reads .* of forward 2"):
        (later if rank else output).logits.argmax(-1)
    close(output.logits.sum() + later.logits.sum(), 2 * gpt2()(ids).logits.sum(), "read by all")
    with pytest.raises(RuntimeError, match=r"get no gradient.\n.*loss: \{gather_logits: always\}"):
        model(ids, labels=ids).logits.retain_grad()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_of_an_evaluation_one_rank_may_read_them_alone() -> None:
    (batch,) = language_batches(VOCAB, count=1)
    ids = batch["input_ids"]
    for build in (gpt2, llama):
        plain = build()
        for chunk in (0, 3):
            model = parallel(copy.deepcopy(plain), 2, loss={"chunk": chunk})
            expected = plain(**batch)
            outputs = []
            for without in (torch.no_grad, torch.inference_mode):
                with without():
                    outputs += [model(ids, attention_mask=batch["attention_mask"]), model(**batch)]
            assert isinstance(model(**batch).logits, ShardedLogits), "it trains"
            model.eval()
            outputs += [model(ids, attention_mask=batch["attention_mask"])]
            trained = model(**batch)
            assert isinstance(trained.logits, ShardedLogits), "it trains, in the mode that from_pretrained leaves"
            if dist.get_rank() == 1:
                for output in outputs:
                    same = output.logits.argmax(-1) == expected.logits.argmax(-1)
                    assert bool(same.all()) and type(output.logits) is torch.Tensor
            close(outputs[1].loss, expected.loss, "loss")
            plain.zero_grad()
            plain(**batch).loss.backward()
            trained.loss.backward()
            same_gradients(model, plain, 2e-5, "trained in evaluation mode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "_AT_ONCE", 7 * VOCAB * 4)
        with torch.no_grad():
            assert type(model(**batch).logits) is ShardedLogits, "too large for a guess"
            assert type(model(ids).logits) is torch.Tensor, "there is no loss to read"
            assert type(model(ids[:1], labels=ids[:1]).logits) is torch.Tensor


class Shapes(TorchDispatchMode):
    """The shapes of the tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made |= {tuple(x.shape) for x in tree_leaves(result) if type(x) is torch.Tensor}
        return result


@pooled(world_size=2)
def test_the_logits_of_a_chunk_are_the_most_that_exist() -> None:
    vocab, seq, hidden = 4001, 40, 24
    plain = llama(vocab_size=vocab, max_position_embeddings=64)
    (batch,) = language_batches(vocab, count=1, batch=2, seq=seq)
    model = parallel(copy.deepcopy(plain), 2, loss={"chunk": 8})
    model.model.embed_tokens.requires_grad_(False)
    with Shapes() as shapes:
        model(**batch).loss.backward()
    weight = model.lm_head.weight  # and its gradient are the largest: [vocab/2, hidden]
    assert weight.shape[1] == hidden and 2 * seq > 3 * hidden
    assert max(map(math.prod, shapes.made)) == weight.numel(), (shapes.made, weight.shape)
    plain(**batch).loss.backward()
    plain.model.embed_tokens.weight.grad = None
    close(model.lm_head.weight.grad, plain.lm_head.weight.grad.tensor_split(2)[dist.get_rank()], "head", 2e-5)


def test_options_that_do_not_fit() -> None:
    parse = autopar.ParallelConfig.parse
    assert parse({"loss": {"chunk": 2048}}).loss_chunk == 2048
    for option, message in {
        ("chunk", -1): "loss.chunk must be at least 0, not -1",
        ("gather_logits", "never"): "loss.gather_logits must be on_read or always, not never",
        ("read_timeout", 0): "loss.read_timeout must be above 0, not 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse({"loss": dict([option])})
    with pytest.raises(ConfigError, match=r"loss\.chunk=8 is not supported with loss\.gather_logits"):
        parse({"loss": {"chunk": 8, "gather_logits": "always"}})
