"""Sections on one process: tp = 1 overhead, training a 1 B Llama, memory of the loss, loading, nccl, FSDP2 offload."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device, Notes, mfu, peak_flops
from benchmarks.models import Size, build, count, tokens
from benchmarks.rounds import Turns, Variant, interleave, summary
from benchmarks.step import greedy
from benchmarks.variants import accepts

TP1: dict[str, Any] = {"model_parallelism": {"tensor_parallel_size": 1}}
TINY: Size = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64, "vocab": 96, "seq": 8, "batch": 2}
LARGE: Size = {"hidden": 1024, "layers": 16, "heads": 16, "ffn": 2816, "vocab": 32000, "seq": 512, "batch": 4}
SMALL: Size = {"hidden": 512, "layers": 8, "heads": 8, "ffn": 1408, "vocab": 32000, "seq": 32, "batch": 1}
ONE_B: Size = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 32000, "seq": 2048}
WIDE: Size = {"hidden": 2048, "layers": 1, "heads": 32, "ffn": 2048, "vocab": 128256, "seq": 4096, "batch": 2}


ZEROS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 0, optimizer on the host": {"optimizer_offload": True},
    "stage 0, fused optimizer on the host": {"optimizer_offload": True},
    "stage 3": {"stage": 3},
    "stage 3, weights on the host": {"stage": 3, "cpu_offload": True},
}


def _sized(options: dict[str, Any], size: Size) -> Size:
    return {**TINY} if options["tiny"] else {"batch": 1, **size}


def _bf16(device: Device) -> torch.dtype:
    return torch.bfloat16 if device.kind == "cuda" else torch.float32


def overhead(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Compare ``tp = 1`` with the plain model: outputs, step, decoding, memory, of a large and a launch-bound model."""
    import autopar

    rounds = 2 if options["tiny"] else 15
    for name, size in {"large": _sized(options, LARGE), "small": _sized(options, SMALL)}.items():
        with notes.part(name):
            plain = build("llama", size).to(device.torch, _bf16(device))
            ids = tokens(size).to(device.torch)
            ours = autopar.initialize(copy.deepcopy(plain), TP1)
            models = {"plain": plain, "autopar": ours}
            with torch.no_grad():
                same = torch.equal(plain(ids).logits, ours(ids).logits)
            notes(f"{name}, logits bitwise equal", same)
            for kind in ("step", "decode"):
                works = {key: _work(kind, model, ids, options["tiny"]) for key, model in models.items()}
                variants = {
                    key: Variant(device.synced(work), False, partial(models[key].zero_grad, set_to_none=True))
                    for key, work in works.items()
                }
                samples = interleave(variants, rounds if kind == "step" else max(2, rounds // 4), _turns(options))
                notes(f"{name}, {kind}", summary(samples, base="plain"))
            for key, model in models.items():
                model.zero_grad(set_to_none=True)
                notes(
                    f"{name}, peak of a step above what is held, MiB, {key}",
                    device.peak_mib(_work("step", model, ids, options["tiny"])),
                )
                model.zero_grad(set_to_none=True)
            notes(f"{name}, most time of a step", _hot(_work("step", ours, ids, options["tiny"]), device))
        plain = ours = models = works = variants = None  # type: ignore[assignment]
        device.release()


def _work(kind: str, model: Any, ids: torch.Tensor, tiny: bool) -> Any:
    if kind == "decode":
        return torch.no_grad()(partial(greedy, model, ids[:1, :8], 3 if tiny else 48))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def _turns(options: dict[str, Any]) -> Turns:
    return Turns(tempfile.mkdtemp(dir=options["folder"]))


def _hot(work: Any, device: Device) -> list[str]:
    """The operations with most time of their own."""
    with torch.profiler.profile() as made:
        device.seconds(work)
    key = "self_device_time_total" if device.kind == "cuda" else "self_cpu_time_total"
    events = sorted(made.key_averages(), key=lambda event: -getattr(event, key))
    return [f"{event.key[:80]}: {event.count} x, {getattr(event, key) / 1e3:.2f} ms" for event in events[:12]]


def training(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Train a 1 B Llama in bf16 with fp32 master weights and ZeRO-1, eager and compiled: tokens/s, MFU, memory."""
    import autopar

    size = _sized(options, ONE_B)
    flops = peak_flops(device.name)
    notes("bf16 peak, TFLOP/s", None if flops is None else flops / 1e12)
    config = {**TP1, "precision": {"dtype": "bf16"}, "zero": {"stage": 1}, "gradient_clipping": 1.0}
    with notes.part("setup"):
        with device.torch:
            model = build("llama", size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
        notes("parameters, M", round(count(model) / 1e6, 1))
        notes("memory of the weights, MiB", device.held_mib())
    compiled = torch.compile(model, backend="inductor" if device.kind == "cuda" else "eager")
    for name, call in {"eager": model, "compiled": compiled}.items():
        with notes.part(name):
            notes(name, _trained(call, optimizer, size, options, device, flops))
    with notes.part("graph breaks"):
        from torch._dynamo.utils import counters

        found = sorted(counters["graph_break"].items(), key=lambda item: -item[1])
        notes("graph breaks", [f"{number} x {reason[:300]}".replace("\n", " ") for reason, number in found[:10]])


def _trained(
    model: Any, optimizer: Any, size: Size, options: dict[str, Any], device: Device, flops: float | None
) -> dict[str, Any]:
    """Train some steps with the largest batch that fits."""
    for batch in (2,) if options["tiny"] else (8, 4, 2, 1):
        ids = tokens(size, batch=batch).to(device.torch)
        losses = []

        def step(ids: torch.Tensor = ids, losses: list[torch.Tensor] = losses) -> None:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        try:
            first = device.seconds(step)
            held, peak = device.held_mib(), device.peak_mib(step)
            taken = sorted(device.seconds(step) for _ in range(2 if options["tiny"] else 8))
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            device.release()
            continue
        median = taken[len(taken) // 2]
        rate = ids.numel() / median
        share = mfu(count(model), size["layers"], size["hidden"], size["seq"], rate, flops)
        return {
            "batch": batch,
            "seq": size["seq"],
            "first step, s": round(first, 2),
            "step, ms": round(median * 1e3, 2),
            "tokens/s": round(rate, 1),
            "MFU": None if share is None else round(share, 4),
            "held MiB": held,
            "peak above it, MiB": peak,
            "losses": [round(float(loss), 4) for loss in losses],
        }
    raise RuntimeError("not even a batch of 1 fits into the memory")


def decode(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Generate tokens of a 1 B Llama: with the growing cache, and with a static one, compiled into CUDA graphs."""
    import autopar

    size = _sized(options, ONE_B)
    with device.torch:
        plain = build("llama", size).to(_bf16(device)).eval()
    models = {"plain": plain, "autopar": autopar.initialize(copy.deepcopy(plain), TP1).eval()}
    ids = tokens(size, batch=1, seq=4 if options["tiny"] else 128).to(device.torch)
    settings = {"max_new_tokens": 4 if options["tiny"] else 64, "do_sample": False, "eos_token_id": None}
    found: dict[str, torch.Tensor] = {}
    for cache in (None,) if options["tiny"] else (None, "static"):
        with notes.part(f"cache {cache}"):

            def work(name: str, cache: Any = cache) -> None:
                found[name] = models[name].generate(ids, cache_implementation=cache, **settings)

            first = {name: round(device.seconds(partial(work, name)), 1) for name in models}
            notes(f"first call, s, cache {cache}", first)  # the second one finds what the first has compiled
            variants = {name: Variant(device.synced(partial(work, name))) for name in models}
            samples = interleave(variants, 2 if options["tiny"] else 7, _turns(options))
            notes(f"{settings['max_new_tokens']} tokens, cache {cache}", summary(samples, base="plain"))
            notes(f"tokens are equal, cache {cache}", torch.equal(found["plain"], found["autopar"]))


def memory(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Compare the most memory of a training step with the planner's."""
    import autopar

    size = _sized(options, LARGE)
    configs: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"precision": {"dtype": "bf16"}, "zero": {"stage": 1}},
        "bf16, recomputed": {"precision": {"dtype": "bf16"}, "activation_checkpointing": {"enable": True}},
    }
    for name, extra in configs.items():
        with notes.part(name):
            model, config = build("llama", size), {**TP1, **extra}
            plan = autopar.plan_memory(model, config, sequence=size["seq"], batch=size["batch"], device="cuda").peak
            device.release()
            before = device.held_mib()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
            ids = tokens(size).to(device.torch)

            def step(model: Any = model, optimizer: Any = optimizer, ids: Any = ids) -> None:
                model.execute_pipeline({"input_ids": ids, "labels": ids})  # the planner counts its gradients
                optimizer.step()
                optimizer.zero_grad()

            step()
            held = device.held_mib() - before
            backward = device.peak_mib(partial(model.execute_pipeline, {"input_ids": ids, "labels": ids}))
            after = device.held_mib() - before
            update = device.peak_mib(optimizer.step)
            parts = {key: round(value / 2**20, 1) for key, value in plan.parts().items()}
            notes(
                name,
                {
                    "most, MiB": round(max(held + backward, after + update), 1),
                    "most in forward and backward, MiB": round(held + backward, 1),
                    "held with gradients, MiB": round(after, 1),
                    "most in the optimizer's step, MiB": round(after + update, 1),
                    "planned without reserve, MiB": round((plan.total - plan.reserve) / 2**20, 1),
                    "held between steps, MiB": round(held, 1),
                    "planned weights and optimizer, MiB": round((plan.weights + plan.optimizer) / 2**20, 1),
                    "planned parts, MiB": str(parts),
                },
            )
        model = optimizer = step = None  # type: ignore[assignment]
        device.release()


def loss_memory(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Compare the memory and time of a step with a wide vocabulary, with the loss in chunks and without."""
    import autopar

    size = _sized(options, WIDE)
    for name, extra in {"whole": {}, "in chunks of 2048": {"loss": {"chunk": 2048}}}.items():
        if reason := accepts({**TP1, **extra}, 1):
            notes(name, reason)
            continue
        with notes.part(name):
            model = autopar.initialize(build("llama", size).to(device.torch, _bf16(device)), {**TP1, **extra})
            step = _work("step", model, tokens(size).to(device.torch), options["tiny"])
            step()
            held, peak = device.held_mib(), device.peak_mib(step)
            notes(name, {"held MiB": held, "peak above it, MiB": peak, "ms": round(device.seconds(step) * 1e3, 2)})
        model = step = None  # type: ignore[assignment]
        device.release()


def loading(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Load a checkpoint into the device's memory, from Hugging Face's form and from shards, against transformers."""
    from transformers import AutoModelForCausalLM

    import autopar
    from autopar.compat.tensors import local_part

    size = _sized(options, ONE_B)
    kind = AutoModelForCausalLM
    with tempfile.TemporaryDirectory(dir=options["folder"]) as folder:
        dtype = _bf16(device)
        with device.torch:
            written = build("llama", size).to(dtype)
        written = written.cpu()
        device.release()
        written.save_pretrained(folder)
        total = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        notes("checkpoint, MiB", round(total / 2**20, 1))

        ways = {
            "transformers": lambda: kind.from_pretrained(folder, dtype=dtype).to(device.torch),
            "autopar.from_pretrained": lambda: autopar.from_pretrained(kind, folder, TP1, dtype=dtype),
            "autopar.from_pretrained, shards": lambda: autopar.from_pretrained(
                kind, f"{folder}/shards", TP1, dtype=dtype
            ),
            "autopar.from_pretrained, ZeRO 3": lambda: autopar.from_pretrained(
                kind, folder, {**TP1, "zero": {"stage": 3}}, dtype=dtype
            ),
        }
        for name, way in ways.items():
            with notes.part(name):
                if "shards" in name:
                    model = autopar.from_pretrained(kind, folder, TP1, dtype=dtype)
                    model.save_parallelized(f"{folder}/shards", timeout=120)
                    model = None
                    device.release()
                loaded: list[Any] = []
                peak = device.peak_mib(lambda way=way, loaded=loaded: loaded.append(way()))  # type: ignore[misc]
                again: list[Any] = []
                loaded_one = loaded.pop()
                parameters = {key: local_part(value).cpu() for key, value in loaded_one.state_dict().items()}
                same = all(torch.equal(parameters[key], value) for key, value in written.state_dict().items())
                where = sorted({str(parameter.device) for parameter in loaded_one.parameters()})
                loaded_one = None
                device.release()
                taken = device.seconds(lambda way=way, again=again: again.append(way()))  # type: ignore[misc]
                notes(name, {"s": round(taken, 3), "peak MiB": peak, "equal": same, "device": where})
                again.clear()


def nccl(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Let ``initialize`` start its own process group (nccl on a GPU) with one rank; collectives, DDP, save and load."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import autopar

    size = _sized(options, SMALL)
    model = autopar.initialize(build("llama", size), TP1)
    notes("backend", str(dist.get_backend_config()))
    notes("device of the model", str(next(model.parameters()).device))
    notes("device of the mesh", str(model.mpu.device))
    ids = tokens(size).to(model.mpu.device)
    with notes.part("collectives"):
        x = torch.ones(4, device=model.mpu.device)
        dist.all_reduce(x)
        whole = torch.empty(4, device=x.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, x)
        dist.barrier()
        notes("all-reduce and all-gather of ones", whole.tolist())
    with notes.part("DistributedDataParallel"):
        wrapped = DistributedDataParallel(model, process_group=model.mpu.dp.group)
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        notes("loss by DistributedDataParallel", round(float(loss), 5))
    with notes.part("generate"):
        found = model.generate(ids[:1, :4], max_new_tokens=4, do_sample=False)
        notes("generated", found.tolist())
    with notes.part("save and load"), tempfile.TemporaryDirectory(dir=options["folder"]) as folder:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model.save_parallelized(folder, timeout=120)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.from_parallelized(folder, timeout=120)
        same = all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        notes("weights are equal after saving and loading", same)
    with notes.part("deparallelize"):
        autopar.deparallelize(model)
        notes("loss after deparallelize", round(float(model(input_ids=ids, labels=ids).loss.detach()), 5))


def offload(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Train with the optimizer (stage 0) and with all weights (stage 3: FSDP2) on the GPU and in the CPU's memory."""
    import autopar

    size = _sized(options, LARGE)
    for name, zero in ZEROS.items():
        if "host" in name and device.kind == "cpu":
            notes(name, "needs an accelerator")
            continue
        with notes.part(name):
            model = build("llama", size)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused="fused" in name or None)
            config = {**TP1, "zero": zero, "precision": {"dtype": "bf16"}}
            model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
            ids = tokens(size).to(device.torch)
            losses = []

            def step(model: Any = model, optimizer: Any = optimizer, ids: Any = ids, losses: Any = losses) -> None:
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(round(float(loss.detach()), 4))

            step()
            peak = device.peak_mib(step)
            taken = device.seconds(step)
            notes(
                name, {"ms": round(taken * 1e3, 2), "peak MiB": peak, "held MiB": device.held_mib(), "losses": losses}
            )
        model = optimizer = step = None  # type: ignore[assignment]
        device.release()
