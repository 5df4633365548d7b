"""Imported once by the fork server, so that every rank of every world starts with it.

``torch._dynamo`` and what it needs are imported by the first optimizer of a process; here that is paid once.
"""

from transformers import (  # noqa: F401
    AutoConfig,
    BertForMaskedLM,
    GenerationMixin,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

import tests.parity
import tests.small  # noqa: F401
