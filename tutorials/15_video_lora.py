"""Tutorial 15: train LoRA adapters of a video model (Wan) that is sharded over two processes, and look at its videos.

pip install -e '.[diffusers,peft]'
torchrun --nproc-per-node 2 tutorials/15_video_lora.py
torchrun --nproc-per-node 2 tutorials/15_video_lora.py --pipeline-parallel-size 2 --tensor-parallel-size 1

A tiny Wan first learns gray squares that move to the right. The adapters then learn red squares that move down. The
script writes the frames of one sample before and after as out/video_lora.png, and compares losses and frames with one
process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import peft
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from offline import arguments, finish, largest_difference, mesh, say, start
from PIL import Image

import autopar

FRAMES, SIZE, SQUARE, WORDS = 4, 12, 4, 2  # WORDS: the length of the text, which is constant here


def videos(count: int, generator: torch.Generator, *, red: bool) -> torch.Tensor:
    """Return [count, 3, FRAMES, SIZE, SIZE] with a gray square that moves right, or a red one that moves down."""
    made = torch.full((count, 3, FRAMES, SIZE, SIZE), -1.0)
    for video, lane in zip(made, torch.randint(0, 3, (count,), generator=generator).tolist(), strict=True):
        for frame in range(FRAMES):
            row, column = (2 * frame, 4 * lane) if red else (4 * lane, 2 * frame)
            video[: 1 if red else 3, frame, row : row + SQUARE, column : column + SQUARE] = 1.0
    return made


def batches(steps: int, count: int, *, red: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yield noisy videos, times and targets of flow matching, as the scripts of diffusers make them from latents."""
    generator = torch.Generator().manual_seed(int(red))
    for _ in range(steps):
        clean = videos(count, generator, red=red)
        noise, sigma = torch.randn(clean.shape, generator=generator), torch.rand(count, generator=generator)
        share = sigma.view(-1, 1, 1, 1, 1)
        inputs = {"hidden_states": (1 - share) * clean + share * noise, "timestep": 1000 * sigma}
        yield {**inputs, "encoder_hidden_states": torch.ones(count, WORDS, 8), "target": noise - clean}


def loss_of(outputs: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs.sample - inputs["target"]).square().mean()


def train(model: Any, optimizer: torch.optim.Optimizer, data: Iterator[dict[str, torch.Tensor]]) -> list[float]:
    """Train a model on one process."""
    losses = []
    for batch in data:
        loss = loss_of(model(**{name: value for name, value in batch.items() if name != "target"}), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def sample(model: Any, steps: int = 16) -> torch.Tensor:
    """Return a video: start with noise, and follow the predicted velocity from time 1 to time 0."""
    video, text = torch.randn(1, 3, FRAMES, SIZE, SIZE, generator=torch.Generator().manual_seed(5)), torch.ones(1, 2, 8)
    for number in range(steps, 0, -1):
        time = torch.tensor([1000.0 * number / steps])
        video = video - model(hidden_states=video, timestep=time, encoder_hidden_states=text).sample / steps
    return video[0]


def write_strip(path: Path, rows: list[torch.Tensor]) -> None:
    """Write a picture with the frames of each video in a row."""
    frames = torch.stack(rows).permute(0, 3, 2, 4, 1).reshape(len(rows) * SIZE, FRAMES * SIZE, 3)
    pixels = ((frames.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numpy.kron(pixels, numpy.ones((8, 8, 1), numpy.uint8))).save(path)


def main() -> None:
    parser = arguments(__doc__, steps=150, batch_size=8)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="stages")
    parser.add_argument("--base-steps", type=int, default=300, help="training steps of the base model")
    args = parser.parse_args()
    rank, world = start()

    # 1. A base model; usually WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").
    sizes = {"num_attention_heads": 3, "attention_head_dim": 24, "num_layers": 4, "ffn_dim": 144, "text_dim": 8}
    base = WanTransformer3DModel(**sizes, in_channels=3, out_channels=3, freq_dim=32, rope_max_seq_len=16).train()
    optimizer = torch.optim.AdamW(base.parameters(), lr=2e-3)
    losses = train(base, optimizer, batches(args.base_steps, args.batch_size, red=False))
    say(f"base model: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    before = sample(base.eval())

    # 2. Add adapters as diffusers does, then call initialize, with the optimizer.
    base.requires_grad_(False)
    base.add_adapter(peft.LoraConfig(r=8, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.2"]))
    reference, transformer = copy.deepcopy(base).train(), base.train()
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=5e-3)
    pp = args.pipeline_parallel_size
    config = {"tp": args.tensor_parallel_size or world // pp, "pp": pp, "pipeline": {"num_microbatches": 2}}
    transformer, optimizer = autopar.initialize(transformer, config, optimizer=optimizer)
    say(f"{mesh(transformer.mpu)}: 3 heads, this rank has {transformer.blocks[0].attn1.heads} of them")

    # 3. Train. Entries of the batch that the model does not take, here the target, go to the criterion.
    losses = []
    for batch in batches(args.steps, args.batch_size, red=True):
        loss = transformer.execute_pipeline(batch, loss_of, broadcast_loss=True).loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    say(f"adapters: loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    # 4. Save a file for pipeline.load_lora_weights(folder). Every rank calls it, and rank 0 writes.
    folder = args.output / "video_lora"
    transformer.save_parallelized(folder, adapter_only=True)
    after = sample(transformer.eval())
    if rank == 0:
        write_strip(args.output / "video_lora.png", [before, after])
        say(f"one row of frames before and one after: {args.output / 'video_lora.png'}")
        trained = [p for p in reference.parameters() if p.requires_grad]
        expected = train(reference, torch.optim.AdamW(trained, lr=5e-3), batches(args.steps, args.batch_size, red=True))
        say(f"one process: largest difference of losses: {largest_difference(losses, expected)}")
        state = WanPipeline.lora_state_dict(folder)
        say(f"adapters: {len(state)} tensors, such as {next(iter(state))}")
    finish()


if __name__ == "__main__":
    main()
