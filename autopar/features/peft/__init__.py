"""Adapters of PEFT (LoRA, DoRA, IA3, prompts) in parallelized models."""

from autopar.registry import Feature, Step

FEATURE = Feature(
    name="peft",
    about="adapters of PEFT",
    library="peft",
    additions={"adapters": "autopar.features.peft.plan:Adapters"},
    rules={
        "dropout_alike": "autopar.features.peft.layers:DropoutAlike",
        "dropout_apart": "autopar.features.peft.layers:DropoutApart",
        "adapter_of_rows": "autopar.features.peft.layers:AdapterOfRows",
        "magnitude": "autopar.features.peft.layers:Magnitude",
        "magnitude_of_parts": "autopar.features.peft.layers:MagnitudeOfParts",
    },
    steps={"adapt_methods": Step("autopar.features.peft.saving:adapt_methods", after="prepare_optimizer")},
)
