"""Imported once by the fork server, so that every rank of every world starts with it."""

import gc
import importlib
import pkgutil

from transformers import AutoConfig, BertForMaskedLM, GenerationMixin, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import autopar
import tests.harness.leftovers
import tests.rehearsals  # noqa: F401
from autopar.dry_run.tensor_parallel import check_plan
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from autopar.tensor_parallel import regions
from tests.small import gpt2

for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
    if not module.name.endswith("__main__"):  # it would run the command line, and end the server
        importlib.import_module(module.name)
regions._LEAST = 0
model = gpt2()
assert check_plan(model, "", make_plan(model, find_policy(model), 2))
gc.collect()
gc.freeze()
