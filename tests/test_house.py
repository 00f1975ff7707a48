"""The house keeps its rules, and each rule finds a breach that is planted in a made-up package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.house import (
    BELOW,
    HEAVY,
    MAX_LINES,
    MOST_LINES,
    NOT_AT_IMPORT,
    TORCH,
    House,
    Module,
    units_below,
    within,
)

REPOSITORY = Path(__file__).resolve().parent.parent

RULES = {
    "imports are absolute": House.relative_imports,
    "imports run downward": House.upward_imports,
    "no import circle": House.circles,
    "scheduling code never touches torch": House.torch_where_it_is_not_wanted,
    "every public name is documented": House.undocumented,
    "only the configuration reads the environment": House.environment_reads,
    "who catches every exception says why": House.unexplained_excepts,
    "nothing prints": House.prints,
    "files stay short": House.long_files,
    "packages only hand names on": House.busy_packages,
}


@pytest.fixture(scope="module")
def house() -> House:
    return House.read(REPOSITORY)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(house: House, rule: str) -> None:
    assert RULES[rule](house) == []


def test_the_rooms_of_grammar_stand_on_six_floors(house: House) -> None:
    floors = house.floors("sgl.grammar")
    assert max(floors.values()) <= 6, floors
    assert floors["sgl.grammar.regular"] == 1


def test_the_table_of_layers_has_no_circle() -> None:
    for unit in BELOW:
        assert unit not in units_below(unit)


def test_importing_sgl_loads_nothing_heavy() -> None:
    assert loaded_by(["sgl"]) & set(NOT_AT_IMPORT) == set()


def test_scheduling_code_runs_without_torch(house: House) -> None:
    assert loaded_by([module.name for module in house.without_torch()]) & set(TORCH) == set()


def test_language_and_grammar_load_nothing_heavy(house: House) -> None:
    names = [name for name in house.modules if within(name, "sgl.lang") or within(name, "sgl.grammar")]
    assert loaded_by(names) & set(HEAVY) == set()


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level names of everything that importing the modules loads, in a fresh interpreter."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


BREACHES = [
    ("imports are absolute", {"sgl.lang.a": "from . import b"}),
    ("imports run downward", {"sgl.runtime.cache.a": "from sgl.runtime.scheduler.b import c"}),
    ("imports run downward", {"sgl.runtime.cache.a": "def f():\n    import sgl.runtime.engine"}),
    ("imports run downward", {"sgl.kernels.a": "if TYPE_CHECKING:\n    import sgl.errors"}),
    ("imports run downward", {"sgl.grammar.a": "from sgl import lang", "sgl.lang": ""}),
    ("imports run downward", {"sgl.lang.backends.a": "import sgl.runtime.engine"}),
    ("imports run downward", {"sgl.lang.a": "def f():\n    import sgl.runtime.engine"}),
    ("imports run downward", {"sgl.runtime.scheduler.a": "from sgl.runtime.runner.b import c"}),
    ("imports run downward", {"sgl.runtime.engine": "import sgl"}),
    ("imports run downward", {"sgl.elsewhere": ""}),
    ("no import circle", {"sgl.lang.a": "import sgl.lang.b", "sgl.lang.b": "def f():\n    import sgl.lang.a"}),
    ("no import circle", {"sgl.lang": "from sgl.lang import a", "sgl.lang.a": "from sgl.lang import name"}),
    ("scheduling code never touches torch", {"sgl.runtime.cache.a": "def f():\n    from torch import nn"}),
    ("every public name is documented", {"sgl.lang.a": "import os"}),
    ("every public name is documented", {"sgl.lang.a": "'A.'\ndef f(): ..."}),
    ("every public name is documented", {"sgl.lang.a": "'A.'\nclass C:\n  'C.'\n  def f(self): ..."}),
    ("only the configuration reads the environment", {"sgl.lang.a": "import os\nos.environ['X']"}),
    ("only the configuration reads the environment", {"sgl.lang.a": "from os import getenv"}),
    ("who catches every exception says why", {"sgl.lang.a": "try: ...\nexcept Exception: ..."}),
    ("who catches every exception says why", {"sgl.lang.a": "try: ...\nexcept: ..."}),
    ("who catches every exception says why", {"sgl.lang.a": "try: ...\nexcept (OSError, BaseException): ..."}),
    ("who catches every exception says why", {"sgl.lang.a": "with contextlib.suppress(Exception): ..."}),
    ("nothing prints", {"sgl.lang.a": "def f():\n    print(1)"}),
    ("files stay short", {"sgl.lang.a": "x = 1\n" * (MAX_LINES + 1)}),
    ("packages only hand names on", {"sgl.lang": "def f(): ..."}),
]


@pytest.mark.parametrize(("rule", "sources"), BREACHES)
def test_a_breach_of_the_rule_is_found(rule: str, sources: dict[str, str]) -> None:
    assert len(RULES[rule](made_up(sources))) == 1


ALLOWED = {
    "sgl": "from sgl.errors import X\ndef __getattr__(name):\n    import sgl.runtime.engine",
    "sgl.cli.options": "'A.'\nimport os\nos.environ",
    "sgl.lang.backends.engine": "'A.'\ndef _f():\n    import sgl.runtime.engine",
    "sgl.lang.a": "'A.'\nclass A(Protocol):\n  'A.'\n  def f(self):\n    'F.'",
    "sgl.lang.b": "'B.'\nfrom sgl.lang.a import A\nclass B(A):\n  'B.'\n  def f(self): ...",
    "sgl.grammar": "'A.'\nfrom sgl.grammar.vocabulary import X\n__all__ = ['X']",
    "sgl.runtime.engine": "'A.'\nimport torch\nfrom sgl.runtime.text.a import b",
    "sgl.runtime.program.a": "'A.'\nfrom sgl.lang.ir import Gen",
    "sgl.runtime.loop.a": "'A.'\ntry: ...\nexcept Exception:  # told\n  ...\ntry: ...\nexcept Exception: raise",
}


@pytest.mark.parametrize("rule", RULES)
def test_what_the_house_allows_is_no_breach(rule: str) -> None:
    assert RULES[rule](made_up(ALLOWED)) == []


def made_up(sources: dict[str, str]) -> House:
    packages = {"sgl", "sgl.lang", "sgl.grammar"}
    return House([Module(name, source, name in packages) for name, source in sources.items()])


OUTSIDE = re.compile(r"(?<![\w/-])(?:\.\./)*shared/|[\"']shared[\"'] */|(?<![\w.])/(?:work|root|home(?!/sgl\b))/\w")
"""Folders that only somebody's machine has; /home/sgl is the images' own."""
WHERE_DATA_LIES = ".ci/run"
WRITTEN = ("", ".py", ".md", ".html", ".c", ".h", ".yml", ".yaml", ".toml", ".in")


SOON = re.compile(r"assert .*\b(?:(?:monotonic|perf_counter|time)\(\) - \w+|elapsed|took|duration) *<")


def test_no_test_holds_that_something_is_done_soon() -> None:
    """A busy machine takes longer, and nothing is wrong. What never ends, a deadline of tests' patience finds."""
    assert SOON.search("    assert time.monotonic() - began < 20")
    assert SOON.search("    assert elapsed < 5")
    assert not SOON.search("    assert time.monotonic() < deadline")
    tests = (REPOSITORY / "tests").glob("*.py")
    assert [path.name for path in tests if path.name != "test_house.py" and SOON.search(path.read_text())] == []


def test_rooms_keep_to_their_lines() -> None:
    counted: Counter[str] = Counter()
    for path in (REPOSITORY / "sgl").rglob("*"):
        if path.suffix in (".py", ".c", ".h"):
            place = ".".join(path.relative_to(REPOSITORY / "sgl").parent.parts)
            room = max((each for each in MOST_LINES if f"{place}.".startswith(each and f"{each}.")), key=len)
            counted[room] += len(path.read_text(encoding="utf-8").splitlines())
    for room, most in MOST_LINES.items():
        assert 0.9 * most <= counted[room] <= most, f"{room or 'sgl'} has {counted[room]} lines"


def test_nothing_names_a_folder_outside_the_project() -> None:
    folders = (".ci", ".github", "benchmarks", "clients", "docker", "docs", "examples", "sgl", "tests", "tools")
    files = [*REPOSITORY.iterdir(), *(path for folder in folders for path in (REPOSITORY / folder).rglob("*"))]
    ours = [path for path in files if not {"node_modules", "dist"} & set(path.parts)]
    written = [path for path in ours if path.suffix in WRITTEN and path.name != ".git" and path.is_file()]
    found = [
        f"{path.relative_to(REPOSITORY)}:{number} {line.strip()[:80]}"
        for path in written
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OUTSIDE.search(line) and "OUTSIDE =" not in line
    ]
    assert [line for line in found if not line.startswith(f"{WHERE_DATA_LIES}:")] == []
    assert len(found) == 1, "CI's script says where data lies"


@pytest.mark.parametrize("beside", [True, False])
def test_ci_hands_tests_the_data_beside_the_checkout(tmp_path: Path, beside: bool) -> None:
    script = tmp_path / "checkout" / WHERE_DATA_LIES
    script.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / WHERE_DATA_LIES, script)
    (tmp_path / "checkout" / "Makefile").write_text("test test-all:\n\t@echo $@ in=$${SGL_TEST_DATA-nothing}\n")
    [named] = re.findall(r"^data=(.+)$", script.read_text(), re.MULTILINE)
    data = (script.parents[1] / named).resolve()
    if beside:
        data.mkdir(parents=True)
    for given in (None, "elsewhere"):
        of_others = ("SGL_TEST_DATA", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # a make above would be told of
        names = {name: value for name, value in os.environ.items() if name not in of_others}
        names |= {"SGL_TEST_DATA": given} if given else {}
        ran = subprocess.run([script], env=names, capture_output=True, text=True, check=True)
        expected = given or (str(data) if beside else "nothing")
        assert ran.stdout.splitlines() == [f"{target} in={expected}" for target in ("test", "test-all")]
