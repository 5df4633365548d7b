"""Keep weights that bitsandbytes or torchao quantized in quantized shards."""

from autopar.registry import Feature

_HERE = "autopar.features.quantized"

FEATURE = Feature(
    name="quantized",
    about="weights of bitsandbytes and torchao, quantized in their shards",
    forms={
        "bitsandbytes.nn.modules": f"{_HERE}.bitsandbytes:find",
        "torchao.utils": f"{_HERE}.torchao:find",
    },
    quantizers={"transformers": f"{_HERE}.files:Quantizers"},
    parts={"base": f"{_HERE}.files:Base"},
)
