"""tutorials/offline.py: the data in the repository, the user's files, and errors for missing names."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from tests.worlds import distributed
from tutorials import offline


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"model": None, "vocab_size": 300, "context": 16, **changes})


@distributed(world_size=2)
def test_the_tokenizer_is_trained_once_and_is_lossless(tmp_path: Path) -> None:
    tokenizer = offline.load_tokenizer(arguments(output=tmp_path))
    assert len(tokenizer) == 300
    text = "Fellow-Citizens, ½ naïve\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    made = (tmp_path / "tokenizer-300" / "tokenizer.json").stat().st_mtime_ns
    again = offline.load_tokenizer(arguments(output=tmp_path))
    assert (tmp_path / "tokenizer-300" / "tokenizer.json").stat().st_mtime_ns == made
    assert again.get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer-300"]

    blocks = offline.Blocks(["one two", "three"], tokenizer, context=4)
    words = [*tokenizer("one two")["input_ids"], tokenizer.eos_token_id, *tokenizer("three")["input_ids"]]
    assert blocks.ids.flatten().tolist() == words[: len(blocks) * 4]
    assert torch.equal(blocks[0]["labels"], blocks.ids[0])
    with pytest.raises(SystemExit, match="fewer than 1 sequence"):
        offline.Blocks(["one"], tokenizer, context=999)


@distributed(world_size=1)
def test_a_users_own_text(tmp_path: Path) -> None:
    import os

    os.environ["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("one", " ", "two")))
    (tmp_path / "b.jsonl").write_text(json.dumps({"words": "one"}))
    assert offline.load_text(str(tmp_path / "a.txt")) == ["one", "two"]
    assert offline.load_text(str(tmp_path / "a.jsonl")) == ["one", "two"]
    with pytest.raises(SystemExit, match="has no column 'text', only words"):
        offline.load_text(str(tmp_path / "b.jsonl"))
    with pytest.raises(SystemExit, match=r"error: --dataset .*nowhere cannot be read"):
        offline.load_text(str(tmp_path / "nowhere"))


@distributed(world_size=1)
def test_a_users_own_model_and_errors(tmp_path: Path) -> None:
    made = arguments(output=tmp_path)
    tokenizer = offline.load_tokenizer(made)
    model = offline.load_model(made, tokenizer)
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    mine = arguments(model=str(tmp_path / "mine"))
    assert offline.load_tokenizer(mine).get_vocab() == tokenizer.get_vocab()
    assert torch.equal(offline.load_model(mine, None).lm_head.weight, model.lm_head.weight)
    nowhere = arguments(model=str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"error: --model .*nowhere cannot be loaded"):
        offline.load_model(nowhere, None)
    with pytest.raises(SystemExit, match=r"error: --model .*nowhere has no readable tokenizer"):
        offline.load_tokenizer(nowhere)
