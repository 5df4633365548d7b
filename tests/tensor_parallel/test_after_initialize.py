"""What users do to a parallel model afterwards: ask for attention maps, switch kernels, checkpoint, add modules."""

import copy
from typing import Any

import torch
from transformers import BartConfig, BartModel, PreTrainedModel

import autopar
from tests.harness.worlds import pooled
from tests.parity import all_close, close, randomise
from tests.random_models import Case, batches, build


def _parallel(model: PreTrainedModel, **sections: Any) -> PreTrainedModel:
    return autopar.initialize(copy.deepcopy(model), {"tp": 2, **sections})


def _same_maps(actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected) > 0
    for mine, theirs in zip(actual, expected, strict=True):
        close(mine, theirs, "an attention map")


@pooled(world_size=2)
def test_towers_with_other_numbers_of_heads_return_whole_maps() -> None:
    torch.manual_seed(0)
    for encoder, decoder in [(3, 4), (5, 4)]:
        config = BartConfig(
            vocab_size=50, d_model=60, encoder_layers=1, decoder_layers=2, encoder_attention_heads=encoder,
            decoder_attention_heads=decoder, encoder_ffn_dim=21, decoder_ffn_dim=22, attn_implementation="eager",
        )  # fmt: skip
        plain = randomise(BartModel(config).eval())
        ids = torch.randint(3, 50, (2, 6))
        outputs = [model(ids, output_attentions=True) for model in (plain, _parallel(plain))]
        for key in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
            _same_maps(outputs[1][key], outputs[0][key])


@pooled(world_size=2)
def test_maps_are_whole_without_keys_inside_outputs_and_from_the_base_model() -> None:
    llama = build(Case("llama", "LlamaForCausalLM", "eager"), 6, 3).eval()
    parallel, ids = _parallel(llama), torch.randint(3, 100, (2, 5))
    _same_maps(
        parallel(ids, output_attentions=True, return_dict=False)[-1],
        llama(ids, output_attentions=True, return_dict=False)[-1],
    )
    base = [model.model(ids, output_attentions=True).attentions for model in (llama, parallel)]
    _same_maps(base[1], base[0])
    case = Case("clip", "CLIPModel")
    clip = build(case, 6, 3).eval()
    clip.set_attn_implementation("eager")
    batch = batches(case, clip.config, 1)[0]
    outputs = [model(**batch, output_attentions=True) for model in (clip, _parallel(clip))]
    for part in ("text_model_output", "vision_model_output"):
        _same_maps(outputs[1][part].attentions, outputs[0][part].attentions)


@pooled(world_size=2)
def test_another_attention_kernel_reaches_attention_with_numbers_of_its_own() -> None:
    for kernels in [("eager", "sdpa"), ("sdpa", "eager")]:
        plain = build(Case("phi3", "Phi3ForCausalLM"), 6, 3).eval()
        plain.set_attn_implementation(kernels[0])
        parallel = copy.deepcopy(_parallel(plain))
        ids = torch.randint(3, 100, (2, 7))
        for kernel in kernels:
            for model in (plain, parallel):
                model.set_attn_implementation(kernel)
            close(parallel(ids).logits, plain(ids).logits, f"logits with {kernel}")
        attention = parallel.model.layers[0].self_attn
        assert attention.config.num_attention_heads < parallel.config.num_attention_heads == 6
        assert attention.config._attn_implementation == kernels[1]
        assert autopar.deparallelize(parallel).model.layers[0].self_attn.config is parallel.config


@pooled(world_size=2)
def test_experts_drop_out_alike_when_they_are_computed_again() -> None:
    """Checkpointing ends a recomputation inside the experts by an exception; random streams must not stay apart."""
    case = Case("mixtral", "MixtralForCausalLM", "batched")
    gradients = []
    for checkpointing in (False, True):
        model = build(case, 6, 3)
        model.config.attention_dropout = 0.3
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        parallel = _parallel(model, activation_checkpointing={"enable": checkpointing}).train()
        torch.manual_seed(3)
        for batch in batches(case, model.config):
            parallel(**batch).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in parallel.named_parameters()})
    all_close(gradients[1], gradients[0], "gradient of {}")
