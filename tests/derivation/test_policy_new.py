"""``autopar policy new``: what it writes, prints and refuses; models with code of their own from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.errors import ConfigError
from autopar.policy.load import read_user_policy
from autopar.tools.verification import verify
from tests.derivation.odd_model import OddConfig, OddForCausalLM
from tests.harness.worlds import pooled

ODD = Path(__file__).with_name("odd_model.py")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.tier("all")
def test_new_check_verify(tmp_path: Path) -> None:
    policy, model = tmp_path / "odd.yaml", f"{ODD}:OddForCausalLM"
    made = run("policy", "new", model, "-o", policy)
    assert made.exit_code == 0, made.stderr
    assert made.stdout == f"wrote {policy}; next: autopar policy check {policy} --model {model}\n"
    lines = policy.read_text().splitlines()
    assert lines[0].startswith("# OddForCausalLM: derived from its modules and a forward; ")
    assert lines[1] == "# Proven on a small random model: outputs and gradients equal the reference model's."
    checked = run("policy", "check", policy, "--model", model, "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["dry_run"] == "ok"
    proof = run("verify", model, "--tp", 2, "--policy", policy, "--checks", "forward", "--json")
    assert proof.exit_code == 0 and json.loads(proof.stdout)["ok"] is True


def test_new_as_json() -> None:
    result = run("policy", "new", f"{ODD}:OddForCausalLM", "--no-proof", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    made = json.loads(result.stdout)
    assert made["proof"] is None and made["file"] is None and made["whole"] == [] and made["unseen"] == []
    assert 0.5 < made["sharded"] < 1
    assert read_user_policy(made["policy"]).model_types == read_user_policy(made["text"]).model_types == ("odd",)
    assert made["policy"]["loss"] == {"OddForCausalLM": "shifted_mean"}
    assert "\nloss: {OddForCausalLM: shifted_mean}\n" in made["text"]
    assert "# Not proven: compare outputs and gradients with the reference model before you use it." in made["text"]


def test_what_is_not_proven_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(small: Any, config: Any, *, policy: dict[str, Any], **how: Any) -> Any:
        return prove(small, config, policy={**policy, "blocks": {**policy["blocks"], "attributes": {}}}, **how)

    prove = verify.verify
    monkeypatch.setattr(verify, "verify", mistaken)
    result = run("policy", "new", f"{ODD}:OddForCausalLM", "-o", tmp_path / "odd.yaml")
    assert result.exit_code == 1 and not (tmp_path / "odd.yaml").exists()
    assert "error: the derived policy is wrong, and not written: OddForCausalLM on tp 2" in result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that comes with its code, as on the hub."""
    path = tmp_path_factory.mktemp("remote") / "odd_remote"
    path.mkdir()
    (path / "odd_model.py").write_text(ODD.read_text())
    torch.manual_seed(0)
    OddForCausalLM(OddConfig()).save_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    content["auto_map"] = {"AutoConfig": "odd_model.OddConfig", "AutoModelForCausalLM": "odd_model.OddForCausalLM"}
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.tier("all")
def test_remote_code_is_run_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    refused = run("policy", "new", folder)
    assert refused.exit_code == 1
    assert refused.stderr == f"error: {folder} requires custom code; --trust-remote-code runs it\n"
    policy = tmp_path / "odd.yaml"
    made = run("policy", "new", folder, "--trust-remote-code", "-o", policy)
    assert made.exit_code == 0, made.stderr
    checked = run("policy", "check", policy, "--model", folder, "--trust-remote-code", "--json")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["dry_run"] == "ok", checked.stdout
    proof = run("verify", folder, "--tp", 2, "--policy", policy, "--checks", "forward", "--trust-remote-code", "--json")
    assert proof.exit_code == 0 and json.loads(proof.stdout)["ok"] is True, proof.stdout
    on_ranks(folder, policy, tmp_path / "saved")


@pooled(world_size=2)
def on_ranks(folder: Path, policy: Path, saved: Path) -> None:
    """Initialize with the policy in the config, or one derived; save, merge, and read it with transformers alone."""
    plain = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.arange(12).reshape(2, 6)
    expected = plain(ids).logits
    for chosen in (str(policy), "derive"):
        config = {"model_parallelism": {"tensor_parallel_size": 2}, "policy": chosen}
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        model = autopar.initialize(model, config)
        assert model.stack[0].all.weight.shape[0] in (24, 36)  # five voices on two ranks
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
        if chosen != "derive":
            model.save_parallelized(saved, merge_checkpoints=True)
            again = type(plain).from_pretrained(saved)
            assert torch.equal(again.stack[0].all.weight, plain.stack[0].all.weight)
        model.mpu.destroy()


def test_a_policy_in_the_configuration() -> None:
    assert autopar.ParallelConfig.parse({"policy": "derive"}).policy == "derive"
    assert autopar.ParallelConfig.parse({"policy": None}).policy == ""
    with pytest.raises(ConfigError, match="policy must be 'derive' or the path of a policy, not 2"):
        autopar.ParallelConfig.parse({"policy": 2})
    with pytest.raises(autopar.PolicyError, match=r"policy file 'nowhere.yaml' does not exist"):
        autopar.initialize(OddForCausalLM(OddConfig()), {"policy": "nowhere.yaml"})
    planned = autopar.plan_memory(OddForCausalLM(OddConfig()), {"tp": 2, "policy": "derive"}, sequence=8, device="cpu")
    assert planned.ranks[0, 0, 0].weights > planned.ranks[0, 0, 1].weights  # three voices and two
