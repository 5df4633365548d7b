"""What users put around ``generate``: transformers' pipeline and streamers, on a parallelized model."""

import contextlib
import io
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import autopar
from autopar.features.generation.generate import AgreedCriteria
from tests.exchange import everyones
from tests.harness.worlds import pooled
from tests.small import llama


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(131)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w1")


def grouped() -> Any:
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1).eval()


def drafter() -> Any:
    """A smaller model of the same vocabulary, which guesses."""
    return llama(1, num_hidden_layers=1).eval()


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beams that are drawn": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": drafter},
    "assisted and drawn": {"assistant_model": drafter, "do_sample": True},
    "by its own first layer": {"assistant_early_exit": 1},
}


def generated(model: Any, way: dict[str, Any], assistant: Any = None) -> list[int]:
    """Tokens after a prompt that repeats itself, so that a guess is right now and then."""
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    torch.manual_seed(3)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **way}
    if assistant is not None:
        settings["assistant_model"] = assistant
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()


@pooled(world_size=2)
def test_pipelines_streamers_and_ways_to_generate() -> None:
    words, plain, asked = tokenizer(), grouped(), ["w5 w6 w7", "w9 w3"]
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = transformers.pipeline("text-generation", model=plain, tokenizer=words)(asked, **settings)
    ids = words(asked[0], return_tensors="pt")["input_ids"]
    text = words.decode(plain.generate(ids, **settings)[0])
    due = {name: generated(plain, way, drafter() if "assistant_model" in way else None) for name, way in WAYS.items()}
    parallel = autopar.initialize(drafter(), {"tp": 2})
    for config in ({"tp": 2}, {"pp": 2}):
        model = autopar.initialize(grouped(), config)
        made = transformers.pipeline("text-generation", model=model, tokenizer=words)
        assert made(asked, **settings) == expected
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            model.generate(ids, streamer=transformers.TextStreamer(words), **settings)
        assert printed.getvalue() == (text + "\n" if dist.get_rank() == 0 else "")
        program = transformers.TextIteratorStreamer(words)
        model.generate(ids, streamer=program, **settings)
        assert "".join(program) == text  # on every rank
        served = transformers.TextIteratorStreamer(words) if dist.get_rank() == 0 else None  # a server's client
        model.generate(ids, streamer=served, **settings)
        assert served is None or "".join(served) == text
        for name, way in WAYS.items():
            for assistant in (drafter(), parallel) if "assistant_model" in way else (None,):
                assert generated(model, way, assistant) == due[name], (name, config)
    assert generated(plain, WAYS["assisted"], parallel) == due["assisted"]


class Rows(transformers.StoppingCriteria):
    """What a program of the user's says: which rows have got enough, and when."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        now = input_ids.shape[1]
        return torch.tensor([now >= self.lengths.get(row, 100) for row in range(len(input_ids))])


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_ranks_stop_at_the_same_token() -> None:
    ids, rank = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]]), dist.get_rank()
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 130}
    plain = grouped()
    ends = {0: 7, 1: 9}
    expected = plain.generate(ids, stopping_criteria=[Rows(ends)], **settings)
    assert expected.shape == (2, 9) and expected[0, 7:].tolist() == [0, 0]
    beams = plain.generate(ids, stopping_criteria=[Rows(dict.fromkeys(range(4), 9))], num_beams=2, **settings)
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        model = autopar.initialize(grouped(), {"model_parallelism": sizes})
        own = Rows({rank: ends[rank]})  # each rank knows of one row
        assert torch.equal(model.generate(ids, stopping_criteria=[own], **settings), expected)
        own = Rows(dict.fromkeys(range(4), 9 + 2 * rank))
        assert torch.equal(model.generate(ids, stopping_criteria=[own], num_beams=2, **settings), beams)
        over = transformers.MaxTimeCriteria(60.0, time.time() - 100 * rank)  # by the clock of rank 1
        assert torch.equal(model.generate(ids, stopping_criteria=[over], **settings), expected[:, :5])
        time.sleep(0.02 * rank)
        one, other = everyones(model.generate(ids, max_time=0.05, **{**settings, "max_new_tokens": 50}).shape)
        assert one == other
        prepared, _ = model._prepare_generation_config(None, **settings)
        prepared.max_length = 16
        model._prepare_special_tokens(prepared)
        usual = model._get_stopping_criteria(prepared, [])
        assert len(usual) == 2 and not any(isinstance(one, AgreedCriteria) for one in usual), "nothing to agree on"
    plain = autopar.deparallelize(model)
    assert torch.equal(plain.generate(ids, stopping_criteria=[Rows(ends)], **settings), expected)
