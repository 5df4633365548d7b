from __future__ import annotations

from tests.zoo.form import Kind

KINDS: dict[str, Kind] = {
    "bert-generation": Kind(
        settings={"is_decoder": True},
    ),
    "electra": Kind(
        variants={"wide": {"embedding_size": None}},
    ),
    "ernie": Kind(
        variants={"tasks": {"use_task_id": True}},
    ),
    "layoutlm": Kind(
        settings={"max_2d_position_embeddings": 16},
    ),
    "roc_bert": Kind(
        settings={
            "pronunciation_embed_dim": 6,
            "pronunciation_vocab_size": 17,
            "shape_embed_dim": 10,
            "shape_vocab_size": 19,
        },
        variants={"plain-embeddings": {"enable_pronunciation": False, "enable_shape": False}},
    ),
}
