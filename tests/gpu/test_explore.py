from __future__ import annotations
import copy, traceback
from typing import Any
import pytest, torch, os
import autopar
from tests.gpu import simulated
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.parity import close, whole
from tests.small import gpt2, llama, parallel

IDS = torch.randint(0, 131, (4, 9), generator=torch.Generator().manual_seed(3))
OFF = {"consistency_check": {"enable": False}}
MP = lambda **k: {"model_parallelism": k}
CASES = {
    "tp2": {**MP(tensor_parallel_size=2), **OFF},
    "tp2check": {**MP(tensor_parallel_size=2)},
    "sp": {**MP(tensor_parallel_size=2, sequence_parallel=True), **OFF},
    "tp2z": {**MP(tensor_parallel_size=2), **OFF, "zero": {"stage": 1}, "gradient_clipping": 1.0},
    "dp2z": {**MP(tensor_parallel_size=1), **OFF, "zero": {"stage": 1}, "gradient_clipping": 1.0},
    "dp2zcheck": {**MP(tensor_parallel_size=1), "zero": {"stage": 1}, "gradient_clipping": 1.0},
    "dp2": {**MP(tensor_parallel_size=1), **OFF},
    "bf16": {
        **MP(tensor_parallel_size=2),
        **OFF,
        "precision": {"dtype": "bf16"},
        "zero": {"stage": 1},
        "gradient_clipping": 1.0,
    },
    "fp16": {
        **MP(tensor_parallel_size=2),
        **OFF,
        "precision": {"dtype": "fp16"},
        "zero": {"stage": 1},
        "gradient_clipping": 1.0,
    },
    "cp2": {**MP(context_parallel_size=2), **OFF},
    "pp2": {**MP(pipeline_parallel_size=2), **OFF},
}


@pytest.mark.parametrize("case", CASES)
@on_device(world_size=2)
def test_explore(case: str) -> None:
    model = llama(**({"attention_dropout": 0.3} if 0 else {}))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = CASES[case]
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    mpu = model.mpu
    assert {p.device.type for p in model.parameters()} == {"sim"}, "params"
    assert {p.device.type for p in model.buffers()} <= {"sim"}, "buffers"
    ids = IDS.to(mpu.device)
    pref = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    mine = ids if mpu.dp.size == 1 else ids[2 * mpu.dp.rank : 2 * mpu.dp.rank + 2]
    log = []
    orig = simulated._on_host
    for step in range(3):
        loss = plain(IDS, labels=IDS).loss
        loss.backward()
        if "gradient_clipping" in config:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        pref.step()
        pref.zero_grad()
        with simulated.waits() as found:
            if case == "pp2":
                try: out = model.execute_pipeline({"input_ids": mine, "labels": mine})
                except Exception as e:
                    while e is not None:
                        print("RANK", mpu.rank, "".join(traceback.format_exception(e))[-2500:]); e = None
                    raise
                out = out.loss if hasattr(out, "loss") else out
            else:
                out = model(mine, labels=mine).loss
                (optimizer.scale_loss(out) if hasattr(optimizer, "scale_loss") else out).backward()
            if mpu.dp_cp.size > 1: autopar.average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        for w in found:
            log.append((step, w.what, w.place, " < ".join(s.split("/")[-1] for s in w.stack[1:6])))
        if mpu.rank == 0:
            print(case, step, loss.item(), out)
    if mpu.rank == 0:
        for w in dict.fromkeys(log):
            print("WAIT", *w)
