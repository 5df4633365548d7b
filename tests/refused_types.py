"""Model types that a dry run, sequence parallelism or context parallelism refuses (``refused_types.yaml``)."""

from pathlib import Path

import yaml

_NAMES = {
    group: frozenset(names.split())
    for group, names in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
NOT_REHEARSED, NOT_BY_ROWS, ROWS_ON_FOUR = (_NAMES[name] for name in ("NOT_REHEARSED", "NOT_BY_ROWS", "ROWS_ON_FOUR"))
NOT_IN_CONTEXT, LATE_IN_CONTEXT = _NAMES["NOT_IN_CONTEXT"], _NAMES["LATE_IN_CONTEXT"]
NAMES_IN_MEMORY = _NAMES["NAMES_IN_MEMORY"]
