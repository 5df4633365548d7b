from __future__ import annotations
import copy, traceback
from typing import Any
import pytest, torch, os
import autopar
from tests.gpu import simulated
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.parity import close, whole, all_close
from tests.small import gpt2, llama, parallel

IDS = torch.randint(0, 131, (4, 9), generator=torch.Generator().manual_seed(3))
OFF = {"consistency_check": {"enable": False}}
MP = lambda **k: {"model_parallelism": k}

def show(tag, mpu, found):
    if mpu.rank == 0:
        for w in dict.fromkeys((w.what, w.place, " < ".join(s.split("/")[-1] for s in w.stack[1:6])) for w in found): print("WAIT", tag, *w)

@on_device(world_size=2)
def test_generate() -> None:
    for build in (gpt2, llama):
        plain = build().eval()
        model = parallel(copy.deepcopy(plain), 2).eval()
        ids = IDS.to(model.mpu.device)
        for s in ({"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}, {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "num_beams": 2}):
            expected = plain.generate(IDS, **s)
            with simulated.waits() as found:
                out = model.generate(ids, **s)
            assert torch.equal(out.cpu(), expected)
            show(f"gen {build.__name__} {len(s)}", model.mpu, found)
        torch.manual_seed(5)
        out = model.generate(ids, max_new_tokens=6, do_sample=True, eos_token_id=None)
        close(out.cpu().float(), out.cpu().float(), "x")
        model.mpu.destroy()

@on_device(world_size=2)
def test_dropout() -> None:
    model = parallel(gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train(), 2)
    ids = IDS.to(model.mpu.device)
    for _ in range(6):
        with simulated.waits() as found:
            model(ids, labels=ids).loss.backward()
    show("dropout", model.mpu, found)
    import torch.distributed as dist
    got = [None, None]
    dist.all_gather_object(got, model(ids).logits.detach().cpu().sum().item())
    assert got[0] == got[1]

@on_device(world_size=2)
def test_pretrained(tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM
    plain = llama()
    if torch.distributed.get_rank() == 0: plain.save_pretrained(tmp_path / "hf")
    torch.distributed.barrier()
    model = autopar.from_pretrained(LlamaForCausalLM, tmp_path / "hf", MP(tensor_parallel_size=2))
    assert {p.device.type for p in model.parameters()} == {"sim"}, "params"
    assert {p.device.type for p in model.buffers()} <= {"sim"}, "buffers"
    ids = IDS.to(model.mpu.device)
    close(model(ids).logits.cpu(), plain(IDS).logits, "logits", 1e-5)
    for name, v in whole(model, lambda p: p.data).items(): assert torch.equal(v, plain.get_parameter(name).data), name

@pytest.mark.parametrize("z", [0, 1])
@on_device(world_size=2)
def test_checkpoint(tmp_path: Any, z) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = autopar.initialize(model, {**MP(tensor_parallel_size=2-z), "zero": {"stage": z}}, optimizer=optimizer)
    mpu = model.mpu
    ids = IDS.to(mpu.device)
    model(ids, labels=ids).loss.backward()
    if mpu.dp_cp.size > 1: autopar.average_gradients(model)
    optimizer.step(); optimizer.zero_grad()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    st = [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    model.save_parallelized(tmp_path, timeout=60, optimizer=optimizer)
    drawn = torch.rand(3, device=mpu.device)
    with torch.no_grad():
        for p in model.parameters(): p.zero_()
    for s in optimizer.state.values():
        for k, v in s.items():
            if torch.is_tensor(v): v.zero_()
    model.from_parallelized(tmp_path, timeout=60, optimizer=optimizer)
    for n, v in model.state_dict().items():
        assert v.device.type == "sim", n
        assert torch.equal(v, before[n]), n
    st2 = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    for a, b in zip(st, st2): assert torch.equal(a, b) and a.device == b.device, (a.device, b.device)
    assert torch.equal(torch.rand(3, device=mpu.device), drawn)
    model.save_parallelized(tmp_path / "hf", merge_checkpoints=True)

@on_device(world_size=2)
def test_other() -> None:
    plain = llama()
    model = parallel(copy.deepcopy(plain), 2)
    model = autopar.deparallelize(model)
    assert {p.device.type for p in model.parameters()} == {"sim"}
    for n, v in model.state_dict().items(): assert torch.equal(v.cpu(), plain.state_dict()[n]), n

@pytest.mark.parametrize("cpu", [False, True])
@on_device(world_size=2)
def test_recompute(cpu) -> None:
    plain = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    model = parallel(copy.deepcopy(plain), 2, activation_checkpointing={"enable": True, "cpu_checkpointing": cpu}).train()
    other = parallel(copy.deepcopy(plain), 2).train()
    ids = IDS.to(model.mpu.device)
    for m in (model, other):
        torch.manual_seed(5)
        m(ids, labels=ids).loss.backward()
    for (n, p), (_, q) in zip(model.named_parameters(), other.named_parameters()): close(p.grad, q.grad, n)

@on_device(world_size=2)
def test_zero3() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = autopar.initialize(model, {**MP(tensor_parallel_size=1), "zero": {"stage": 3}}, optimizer=optimizer)
    ids = IDS.to(model.mpu.device)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward(); optimizer.step(); optimizer.zero_grad(); losses.append(loss.item())
    assert losses[-1] < losses[0]
