"""docs/configuration.md names every key of the config, with its default."""

import re

import yaml

import autopar
from autopar.config.sections import PLAIN, SECTIONS, SHORT, PipelineConfig
from tests.docs.pages import DOCS, codes


def test_the_configuration_is_documented_whole() -> None:
    text = (DOCS / "configuration.md").read_text()
    (example,) = codes(text, "yaml")
    content = yaml.safe_load(example.text)
    config = autopar.ParallelConfig.parse(content)
    # What the example sets; everything else in it is the default.
    assert config == autopar.ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline=PipelineConfig(microbatch_size=1, layers_per_stage=(6, 6)),
        zero_stage=1,
        precision="fp16",
        gradient_clipping=1.0,
    )
    known = {*PLAIN, *(f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys)}
    shown = {
        f"{section}.{key}" if key else section
        for section, keys in content.items()
        for key in (keys if isinstance(keys, dict) else [""])
    }
    assert shown == known - {"pipeline.num_microbatches", *SHORT}  # microbatch_size and the long names are there
    assert set(re.findall(r"^\| `(\w+(?:\.\w+)?)` \|", text, re.MULTILINE)) == known
