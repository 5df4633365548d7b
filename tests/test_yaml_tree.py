"""Reading YAML: the same with libyaml and without, values and lines right, and no file hangs or crashes the process."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.config import ParallelConfig
from autopar.errors import ConfigError, PolicyError
from autopar.policy import yaml_reader as module
from autopar.policy.files import policy_folder
from autopar.policy.load import read_user_policy
from autopar.policy.yaml_reader import plain, yaml_tree

LOADERS = [yaml.SafeLoader] + ([yaml.CSafeLoader] if yaml.__with_libyaml__ else [])


@pytest.fixture(params=LOADERS, ids=lambda loader: loader.__name__)
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_EVENTS", request.param)
    return request.param


def read(text: str) -> Any:
    def fail(problem: str, line: object) -> Exception:
        return ValueError(f"{line}: {problem}")

    return plain(yaml_tree(text, "file", fail))


def test_every_policy_is_the_same_data_for_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [path.read_text() for path in sorted(policy_folder().rglob("*.yaml"))]
    assert len(files) > 250
    found = []
    for loader in LOADERS:
        monkeypatch.setattr(module, "_EVENTS", loader)
        found.append([read(text) for text in files])
    assert found[0] == found[-1]
    assert found[0] == [yaml.load(text, LOADERS[-1]) for text in files]  # what other tools see in them


# text, value: as in YAML 1.2, and the words of YAML 1.1 for true and false
VALUES = [
    ("[true, Yes, ON, false, no, Off]", [True, True, True, False, False, False]),
    ("[~, null, NULL, '', '~', nUll]", [None, None, None, "", "~", "nUll"]),
    ("[1e-5, 1E5, -1.5e3, .5, 5., +0.25, 1_000.5]", [1e-5, 1e5, -1500.0, 0.5, 5.0, 0.25, 1000.5]),
    ("[0, 12, -3, +4, 1_000, 0x1f, 0o17]", [0, 12, -3, 4, 1000, 31, 15]),
    (
        "[010, 1:30, 1:30:00, 2026-13-45, 1_, 1e, 0x, '5', \"yes\"]",
        ["010", "1:30", "1:30:00", "2026-13-45", "1_", "1e", "0x", "5", "yes"],
    ),
    ("[.inf, -.INF]", [math.inf, -math.inf]),
    ("{1: a, true: b, ~: c, 1.5: d}", {"1": "a", "true": "b", "~": "c", "1.5": "d"}),
    ("a:\n- b\n-   c: d\n    e: [f]", {"a": ["b", {"c": "d", "e": ["f"]}]}),
    ("a: |\n  b\n  c\n", {"a": "b\nc\n"}),
    ("---\na: 1\n...\n", {"a": 1}),
    ("\ufeffa: 1", {"a": 1}),
    ("a: &name 1", {"a": 1}),
    ("a:\nb: ''", {"a": None, "b": ""}),
    ("# nothing", None),
    ("9" * 5000, "9" * 5000),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=[text[:20] for text, _ in VALUES])
def test_values(either: Any, text: str, value: Any) -> None:
    found = read(text)
    assert found == value and repr(found) == repr(value)  # 1 is not True
    assert math.isnan(read(".nan"))


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{n}: &{n} [*{p}, *{p}, *{p}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
)

WRONG = [
    (LAUGHS, "2: has an alias (*a), which is not supported; write the value out"),
    ("a: 1\nb: &b [*b]", "2: has an alias (*b), which is not supported; write the value out"),
    ("a: 1\nb: &b {c: *b}", "2: has an alias (*b), which is not supported; write the value out"),
    ("a: 1\n<<: {b: 2}", "2: has a merge key ('<<'), which is not supported; write the keys out"),
    ("a: 1\nb: 2\na: 3", "3: key 'a' is also in line 1"),
    ("a: {b: 1,\n  b: 1}", "2: key 'b' is also in line 1"),
    ("a: 1\n? [b]\n: 2", "2: has a list or a mapping as a key; a key must be a word"),
    ("{a: 1}: 2", "1: has a list or a mapping as a key; a key must be a word"),
    ("a: 1\n---\nb: 2", "2: must hold one document, got a second one ('---')"),
    ("a: !!str 5", "1: has a tag, which is not supported: !!str with the value '5'"),
    ("a: !!python/object/apply:os.system [ls]", "1: has a tag, which is not supported: "),
    ("\n\na: b\x00", "3: cannot be parsed as YAML: character '\\x00' is not allowed"),
    ("a: \ud800", "1: cannot be parsed as YAML: character '\\ud800' is not allowed"),
    ("a: 1\nb:\n\tc: 1", "3: cannot be parsed as YAML: found character"),
    ("- " * 200_000, "1: is nested more than 50 levels deep"),
    ("[" * 200_000, "1: is nested more than 50 levels deep"),
    ("{a: " * 200_000, "1: is nested more than 50 levels deep"),
    ("\n".join(" " * n + "a:" for n in range(99)), "51: is nested more than 50 levels deep"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_refused(either: Any, text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError) as info:
        read(text)
    assert str(info.value).startswith(message)
    assert ("indent with blanks instead of tabs" in str(info.value)) == ("\t" in text)
    assert time.process_time() - began < 10


def test_a_question_mark_where_the_pure_reader_wants_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVENTS", yaml.SafeLoader)
    with pytest.raises(ValueError) as info:
        read("a: 1\nmodels: [x?, y]")
    assert str(info.value) == (
        "2: cannot be parsed as YAML: expected ',' or ']', but got '?'; inside [...] and {...} quote values with a '?'"
    )
    assert read("models: ['x?', y]") == {"models": ["x?", "y"]}


def test_a_policy_and_a_config_file_are_read_alike(either: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text, message in WRONG:
        if "\ud800" in text:
            continue
        file.write_text(text)
        line, problem = message.split(": ", 1)
        with pytest.raises(PolicyError) as refused:
            read_user_policy(file)
        assert str(refused.value).startswith(f"{file}:{message}")
        if "\n" in text:
            with pytest.raises(PolicyError) as refused:
                read_user_policy(text)
            assert str(refused.value).startswith(f"policy text:{message}")
        with pytest.raises(ConfigError) as wrong:
            ParallelConfig.parse(file)
        assert str(wrong.value).startswith(f"config file '{file}', line {line}: {problem}")


def test_a_policy_from_a_dict_that_holds_itself() -> None:
    policy: dict[str, Any] = {"match": {"model_type": "mine"}}
    policy["blocks"] = {"modules": policy}
    with pytest.raises(PolicyError, match=r"^policy dict:blocks\.modules\.blocks: is nested more than 50 levels deep"):
        read_user_policy(policy)
