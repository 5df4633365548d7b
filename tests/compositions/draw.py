"""Draw a composition of options from a seed: plain data, so that it can be printed, changed and repeated."""

import random
from dataclasses import dataclass, field
from typing import Any

MODEL_TYPES = (
    "gpt2", "llama", "qwen3", "gemma2", "phi3", "falcon", "bloom", "gpt_neox", "opt", "mixtral", "deepseek_v3",
    "mamba2", "qwen3_next", "bart", "t5", "bert",
)  # fmt: skip
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


@dataclass(frozen=True)
class Composition:
    """What is run.

    Attributes:
        ranks: of the world.
        sizes: the section ``model_parallelism``.
        config: the other sections of the config.
        loop: what the training loop does: ``micro`` batches a step, ``optimizer``, ``evaluate`` after the second step,
            ``given`` (the optimizer is given to ``initialize``), ``wrapper`` (who averages gradients).
    """

    model_type: str
    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """How many data-parallel replicas the world has."""
        result = self.ranks
        for name in SIZES:
            result //= self.sizes.get(name, 1)
        return result

    @property
    def whole_config(self) -> dict[str, Any]:
        """The config that ``initialize`` gets."""
        return {"model_parallelism": self.sizes, **self.config}

    def __str__(self) -> str:
        return f"{self.model_type} on {self.ranks} ranks: {self.whole_config}, {self.loop}"


def draw(seed: int, ranks: int) -> Composition:
    """Draw a composition for a world of so many ranks."""
    random_ = random.Random(seed)

    def maybe(share: float, value: Any) -> Any:
        return value if random_.random() < share else None

    left, sizes = ranks, dict[str, Any]()
    for name in random_.sample(SIZES, len(SIZES)):
        size = random_.choice([size for size in (1, 2, 4) if size <= left])
        left //= size
        sizes |= {name: size} if size > 1 else {}
    tp, pp, cp = (sizes.get(name, 1) for name in SIZES)
    sizes |= _kept(
        sequence_parallel=maybe(0.5, True) if tp > 1 else None,
        context_parallel_method=maybe(0.5, random_.choice(["ulysses", "gather"])) if cp > 1 else None,
        cpu_transport=maybe(0.4, random_.choice(["gloo", "shm"])),
        reduce_dtype=maybe(0.2, "fp32"),
    )
    micro = random_.choice([1, 2, 4])
    stages = {"schedule": random_.choice(["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"]), "num_microbatches": 4}
    zero = random_.choice([0, 1, 3 if pp == 1 else 1])
    config = _kept(
        pipeline=stages if pp > 1 else None,
        zero={"stage": zero} if zero and left > 1 else None,
        gradient_clipping=maybe(0.4, 0.5),
        activation_checkpointing=maybe(0.3, {"enable": True}),
        loss=maybe(0.4, {"chunk": 5} if random_.random() < 0.5 else {"gather_logits": "always"}),
        consistency_check=maybe(0.2, {"inputs": "every 2"}),
    )
    loop = _kept(
        micro=4 if pp > 1 else micro,
        optimizer=random_.choice(["adamw", "sgd"]),
        evaluate=maybe(0.5, True),
        given=True if {"zero", "gradient_clipping"} & set(config) else maybe(0.5, True),
        wrapper=maybe(0.3, "ddp") if pp == 1 and zero != 3 else None,
    )
    return Composition(random_.choice(MODEL_TYPES), ranks, sizes, config, loop)


def _kept(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
