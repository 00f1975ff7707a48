"""The package as source: who imports whom, and each breach of the house's rules as a readable line.

`BELOW` is the table of layers; a new module or folder gets its place there. The rules read syntax trees, so an
import inside a function or under TYPE_CHECKING counts like any other. tests/test_house.py asserts the rules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# unit -> the units right below it. A module may import its own unit and whatever lies anywhere below; the longest
# matching name decides a module's unit.
BELOW: dict[str, tuple[str, ...]] = {
    "sgl": ("sgl.__main__", "sgl.launch_server", "sgl.bench_serving", "sgl.compat"),
    "sgl.platforms.check": ("sgl",),
    "sgl.platforms": ("sgl.runtime.runner",),
    "sgl.__main__": ("sgl.cli",),
    "sgl.launch_server": ("sgl.cli",),
    "sgl.bench_serving": ("sgl.cli",),
    "sgl.compat": ("sgl.lang", "sgl.compat.names"),
    "sgl.compat.names": (),
    "sgl.cli": ("sgl.runtime.server", "sgl.runtime.cluster", "sgl.bench", "sgl.lang"),
    "sgl.bench": ("sgl.runtime.engine", "sgl.lang"),
    "sgl.runtime.cluster": ("sgl.runtime.gateway", "sgl.child"),
    "sgl.runtime.gateway": ("sgl.runtime.server",),
    "sgl.runtime.server": (
        "sgl.runtime.engine",
        "sgl.runtime.metrics",
        "sgl.lang.ir",
        "sgl.lang.typed",
        "sgl.lang.view",
    ),
    "sgl.runtime.metrics": ("sgl.errors",),
    "sgl.runtime.profile": ("sgl.errors",),
    "sgl.runtime.follower": ("sgl.runtime.rank_start",),
    "sgl.runtime.engine": (
        "sgl.runtime.profile",
        "sgl.runtime.startup",
        "sgl.runtime.program",
        "sgl.runtime.training",
        "sgl.options",
    ),
    "sgl.runtime.training": ("sgl.runtime.startup", "sgl.runtime.requests", "sgl.runtime.weights"),
    "sgl.runtime.weights": ("sgl.runtime.requests", "sgl.runtime.tier_choice", "sgl.runtime.occupation"),
    "sgl.runtime.occupation": ("sgl.runtime.loop", "sgl.runtime.parallel"),
    "sgl.runtime.program": ("sgl.runtime.requests", "sgl.lang.ir", "sgl.lang.typed"),
    "sgl.runtime.requests": ("sgl.runtime.loop", "sgl.runtime.config", "sgl.runtime.platform"),
    "sgl.runtime.kv_events": ("sgl.runtime.cache",),
    "sgl.runtime.startup": ("sgl.runtime.rank_start", "sgl.runtime.kv_events", "sgl.runtime.deterministic"),
    "sgl.runtime.rank_start": (
        "sgl.runtime.speculate",
        "sgl.runtime.parallel",
        "sgl.runtime.text",
        "sgl.runtime.attention_choice",
        "sgl.runtime.adapter_choice",
        "sgl.runtime.draft_choice",
        "sgl.runtime.transfer_choice",
    ),
    "sgl.runtime.deterministic": ("sgl.runtime.model", "sgl.runtime.config", "sgl.kernels"),
    "sgl.runtime.draft_choice": (
        "sgl.runtime.speculate",
        "sgl.runtime.attention_choice",
        "sgl.runtime.memory_plan",
        "sgl.runtime.text",
    ),
    "sgl.runtime.transfer_choice": ("sgl.runtime.tier_choice", "sgl.runtime.parallel", "sgl.runtime.shared_choice"),
    "sgl.runtime.shared_choice": ("sgl.runtime.memory_plan", "sgl.runtime.runner", "sgl.runtime.transfer"),
    "sgl.runtime.tier_choice": (
        "sgl.runtime.memory_plan",
        "sgl.runtime.scheduler",
        "sgl.runtime.runner",
        "sgl.runtime.option_checks",
    ),
    "sgl.runtime.option_checks": ("sgl.runtime.constraints", "sgl.runtime.config"),
    "sgl.runtime.memory_plan": ("sgl.runtime.devices", "sgl.runtime.adapter_choice", "sgl.runtime.cache"),
    "sgl.runtime.devices": ("sgl.runtime.model", "sgl.runtime.platform"),
    "sgl.runtime.platform": ("sgl.kernels", "sgl.machine_limits", "sgl.errors", "sgl.numerals"),
    "sgl.runtime.parallel": ("sgl.runtime.runner", "sgl.runtime.forks"),
    "sgl.runtime.attention_choice": ("sgl.kernels", "sgl.runtime.config", "sgl.runtime.platform"),
    "sgl.runtime.adapter_choice": ("sgl.runtime.model", "sgl.runtime.config"),
    "sgl.runtime.loop": ("sgl.runtime.speculate",),
    "sgl.runtime.speculate": ("sgl.runtime.scheduler", "sgl.runtime.runner", "sgl.runtime.constraints"),
    "sgl.machine_limits": (),
    "sgl.runtime.constraints": (
        "sgl.grammar",
        "sgl.runtime.text",
        "sgl.runtime.batch",
        "sgl.runtime.config",
        "sgl.child",
        "sgl.runtime.framing",
        "sgl.machine_limits",
    ),
    "sgl.runtime.forks": ("sgl.child", "sgl.errors"),
    "sgl.child": (),
    "sgl.runtime.framing": (),
    "sgl.runtime.scheduler": ("sgl.runtime.transfer", "sgl.runtime.config"),
    "sgl.runtime.transfer": ("sgl.runtime.cache",),
    "sgl.runtime.cache": ("sgl.runtime.batch",),
    "sgl.runtime.jax": ("sgl.runtime.runner",),  # found by its platform's name
    "sgl.runtime.runner": ("sgl.runtime.model", "sgl.runtime.batch", "sgl.runtime.platform", "sgl.grammar"),
    "sgl.runtime.model": (
        "sgl.kernels",
        "sgl.runtime.config",
        "sgl.runtime.gguf",
        "sgl.runtime.media",
        "sgl.runtime.bounded_regex",
    ),
    "sgl.runtime.bounded_regex": (),
    "sgl.runtime.text": ("sgl.grammar.vocabulary", "sgl.runtime.gguf", "sgl.runtime.bounded_regex"),
    "sgl.runtime.gguf": ("sgl.errors",),
    "sgl.runtime.batch": ("sgl.runtime.sampling_params", "sgl.grammar", "sgl.runtime.media"),
    "sgl.runtime.media": ("sgl.errors",),
    "sgl.runtime.sampling_params": ("sgl.lang.ir.sampling",),
    "sgl.runtime.config": (
        "sgl.lang.ir.sampling",
        "sgl.runtime.lora_options",
        "sgl.runtime.key_options",
        "sgl.options",
    ),
    "sgl.runtime.lora_options": (),
    "sgl.runtime.key_options": (),
    "sgl.runtime": (),  # its __init__.py
    "sgl.lang": ("sgl.lang.record", "sgl.machine_limits"),
    "sgl.lang.record": ("sgl.lang.config", "sgl.lang.typed", "sgl.lang.view", "sgl.machine_limits"),
    "sgl.lang.config": ("sgl.lang.backends", "sgl.lang.environment"),
    "sgl.lang.backends": ("sgl.lang.ir", "sgl.lang.typed", "sgl.lang.environment", "sgl.options", "sgl.child"),
    "sgl.lang.view": ("sgl.lang.ir",),
    "sgl.lang.environment": (),
    "sgl.lang.typed": ("sgl.lang.ir", "sgl.lang.aio"),
    "sgl.lang.aio": (),
    "sgl.lang.ir": ("sgl.lang.ir.sampling", "sgl.formats"),
    "sgl.lang.ir.sampling": ("sgl.errors", "sgl.numerals"),
    "sgl.grammar": ("sgl.grammar.matching", "sgl.grammar.schema", "sgl.grammar.backends"),
    "sgl.grammar.matching": ("sgl.grammar.automaton", "sgl.grammar.vocabulary", "sgl.grammar.token_matcher"),
    "sgl.grammar.backends": (
        "sgl.grammar.automaton",
        "sgl.grammar.vocabulary",
        "sgl.grammar.ebnf",
        "sgl.grammar.token_matcher",
    ),
    "sgl.grammar.token_matcher": (),
    "sgl.grammar.automaton": (
        "sgl.grammar.shape",
        "sgl.grammar.text",
        "sgl.grammar.ebnf",
        "sgl.grammar.vocabulary.special",
        "sgl.native_code",
    ),
    "sgl.grammar.schema": ("sgl.grammar.shape", "sgl.grammar.text"),
    "sgl.grammar.text": ("sgl.grammar.regular",),
    "sgl.grammar.shape": ("sgl.grammar.regular",),
    "sgl.grammar.ebnf": ("sgl.grammar.regular",),
    "sgl.grammar.vocabulary": ("sgl.grammar.vocabulary.special", "sgl.time_limit", "sgl.errors"),
    "sgl.grammar.vocabulary.special": (),
    "sgl.grammar.regular": ("sgl.time_limit", "sgl.errors"),
    "sgl.kernels": ("sgl.native_code",),
    "sgl.native_code": (),
    "sgl.models": (),
    "sgl.formats": ("sgl.errors",),
    "sgl.time_limit": ("sgl.errors",),
    "sgl.options": (),
    "sgl.errors": (),
    "sgl.numerals": (),
}

# The one arrow that points up: a backend of the language starts the engine inside the call that needs it.
SEAM_FROM, SEAM_TO = "sgl.lang.backends.", "sgl.runtime."

WITHOUT_TORCH = (
    "sgl.errors",
    "sgl.lang",
    "sgl.grammar",
    "sgl.runtime.batch",
    "sgl.runtime.media",
    "sgl.runtime.sampling_params",
    "sgl.runtime.config",
    "sgl.runtime.scheduler",
    "sgl.runtime.cache",
    "sgl.runtime.transfer",
    "sgl.runtime.speculate.drafter",
    "sgl.runtime.speculate.pools",
    "sgl.runtime.speculate.lookup",
    "sgl.runtime.speculate.budget",
    "sgl.runtime.speculate.grammar",
    "sgl.runtime.speculate.trials",
)
TORCH = ("torch", "triton", "flashinfer")
HEAVY = (*TORCH, "jax", "transformers", "ray", "aiohttp")
# What `import sgl` may not load either: each alone would take a good part of its 150 ms.
NOT_AT_IMPORT = (*HEAVY, "numpy", "pydantic", "requests", "tokenizers", "safetensors", "outlines_core", "jinja2")

READS_ENVIRONMENT = (
    "sgl.runtime.config",
    "sgl.lang.environment",
    "sgl.cli.cluster",
    "sgl.cli.options",
    "sgl.runtime.forks",
    "sgl.runtime.cluster.cluster",
    "sgl.runtime.cluster.spares",
    "sgl.runtime.cluster.serve_app",
)  # or hands it on, or gives it to Ray
DOES_MORE_THAN_HAND_ON = ("sgl",)  # the lazy public API
MAX_LINES = 450
MOST_LINES = {
    "grammar": 15_750,  # with values of calls that are not quite JSON, and ends that take time by their members
    "kernels": 8_090,  # with memory that processes share, inputs that move, few tokens or rows, room for several
    "kernels.gdn": 790,
    "kernels.latent": 990,
    "kernels.lora": 580,  # of experts, too
    "kernels.moe": 1_850,
    "lang": 10_090,  # with Jinja as transformers has it, and programs that outlive their server or fail
    "runtime": 29_800,  # without the server and what follows; with drafts as one graph, steps ahead, checks of configs
    "runtime.cluster": 2_250,  # with a placement for each kind, who is starting, starts, ends, and calls of any length
    "runtime.gateway": 3_690,  # with who has failed a program, or has the adapters that it names now or later
    "runtime.jax": 1_290,  # with a kernel that reads pages where they lie
    "runtime.media": 800,  # with bounds on all frames of a video before any is decoded
    "runtime.model.eagle": 560,  # with what later trainers of heads norm, tie and window; and the products of a graph
    "runtime.model.gdn": 1_100,
    "runtime.model.hf": 1_440,  # with hybrids that have attention alone
    "runtime.model.mla": 940,
    "runtime.model.quantized": 1_130,  # with NVFP4, MXFP8, bitsandbytes, AutoRound, all of compressed-tensors
    "runtime.model.update": 1_350,  # with groups that are left at once
    "runtime.parallel": 1_580,  # with what ranks share beside pages, and who removes it
    "runtime.server": 12_725,  # with what trainers ask of SGLang, the reader of KV events, and checks of options
    "runtime.speculate": 1_770,  # with weights that are gone, drafts ahead of the host, looks, a default, and room
    "runtime.transfer": 1_270,  # from GPU to GPU, too, where the time of a read goes, and who does not answer
    "cli": 2_945,  # with clusters that end at any signal with its code, and the place of what is no value of YAML
    "bench": 860,
    "platforms": 275,
    "compat": 490,
    "formats": 2_040,  # of every family that writes calls in its own way, read alike in any pieces
    "": 890,
}
"""Lines of .py and .c files by room. What needs more raises its room's number, and says why."""


@dataclass(frozen=True)
class Import:
    """One imported module; `in_function` where it happens in a call."""

    target: str
    line: int
    in_function: bool


@dataclass(frozen=True)
class Module:
    """A module by its dotted name (a package by its own name) and its source."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=self.name)


class House:
    """Every module of the package, and the breaches of each rule as readable lines."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = {module.name: module for module in modules}

    @classmethod
    def read(cls, root: Path) -> House:
        modules = []
        for path in sorted((root / "sgl").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
        return cls(modules)

    def imports(self, module: Module) -> Iterator[Import]:
        """Every import, each `from package import submodule` as an import of the submodule."""

        def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, in_function) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = "." * node.level + (node.module or "")
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    yield Import(inner if inner in self.modules else source, node.lineno, in_function)
            is_call = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, in_function or is_call)

        return visit(module.tree, False)

    def own_imports(self, module: Module) -> Iterator[Import]:
        return (found for found in self.imports(module) if within(found.target, "sgl"))

    def relative_imports(self) -> list[str]:
        return [
            f"{module.name}:{found.line} imports {found.target}: imports are absolute"
            for module in self.modules.values()
            for found in self.imports(module)
            if found.target.startswith(".")
        ]

    def upward_imports(self) -> list[str]:
        breaches = []
        for module in self.modules.values():
            unit = unit_of(module.name)
            if unit == "sgl" and module.name != "sgl":
                breaches.append(f"{module.name} has no place in the table of layers")
                continue
            allowed = units_below(unit) | {unit}
            for found in self.own_imports(module):
                is_seam = (
                    found.in_function and module.name.startswith(SEAM_FROM) and found.target.startswith(SEAM_TO)
                )
                if unit_of(found.target) not in allowed and not is_seam:
                    breaches.append(f"{module.name}:{found.line} imports {found.target}, which is not below {unit}")
        return breaches

    def circles(self) -> list[str]:
        """One line per circle that a depth-first walk closes."""
        arrows = {name: {found.target for found in self.own_imports(m)} for name, m in self.modules.items()}
        closed: list[str] = []
        finished: set[str] = set()

        def walk(name: str, path: list[str]) -> None:
            if name in path:
                closed.append(" -> ".join([*path[path.index(name) :], name]))
            elif name not in finished:
                for target in sorted(arrows.get(name, ())):
                    walk(target, [*path, name])
                finished.add(name)

        for name in arrows:
            walk(name, [])
        return closed

    def floors(self, package: str) -> dict[str, int]:
        """How high each room of a package stands: its modules and folders, above those that they import."""

        def room(name: str) -> str:
            return ".".join(name.split(".")[: package.count(".") + 2])

        below: dict[str, set[str]] = {}
        for name, module in self.modules.items():
            if within(name, package):
                targets = {
                    room(found.target) for found in self.own_imports(module) if within(found.target, package)
                }
                below.setdefault(room(name), set()).update(targets - {room(name)})

        def floor(name: str) -> int:
            return 1 + max((floor(each) for each in below.get(name, ())), default=0)

        return {name: floor(name) for name in below}

    def torch_where_it_is_not_wanted(self) -> list[str]:
        return [
            f"{module.name}:{found.line} imports {found.target}"
            for module in self.without_torch()
            for found in self.imports(module)
            if found.target.partition(".")[0] in TORCH
        ]

    def without_torch(self) -> list[Module]:
        return [m for m in self.modules.values() if any(within(m.name, unit) for unit in WITHOUT_TORCH)]

    def undocumented(self) -> list[str]:
        breaches = []
        for module in self.modules.values():
            if ast.get_docstring(module.tree) is None and not module.is_package:
                breaches.append(f"{module.name} has no docstring")
            for node in module.tree.body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or _is_private(
                    node.name
                ):
                    continue
                if ast.get_docstring(node) is None and not _is_overload(node):
                    breaches.append(f"{module.name}:{node.lineno} {node.name} has no docstring")
                if isinstance(node, ast.ClassDef):
                    breaches.extend(
                        f"{module.name}:{method.lineno} {node.name}.{method.name} has no docstring"
                        for method in _methods(node)
                        if not _is_private(method.name) and not self._is_explained(node, method)
                    )
        return breaches

    def _is_explained(self, owner: ast.ClassDef, method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Whether the method, or what it overrides in a class of ours, has a docstring."""
        if ast.get_docstring(method) is not None or _is_overload(method):
            return True
        bases = {_last_name(base) for base in owner.bases}
        return any(
            self._is_explained(base, next((its for its in _methods(base) if its.name == method.name), method))
            for base in self._classes
            if base.name in bases and base is not owner
        )

    @cached_property
    def _classes(self) -> list[ast.ClassDef]:
        return [node for m in self.modules.values() for node in m.tree.body if isinstance(node, ast.ClassDef)]

    def environment_reads(self) -> list[str]:
        return [
            f"{module.name}:{node.lineno} reads the environment"
            for module in self.modules.values()
            if module.name not in READS_ENVIRONMENT
            for node in ast.walk(module.tree)
            if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and _names(node) & {"environ", "getenv"})
        ]

    def unexplained_excepts(self) -> list[str]:
        """Handlers of every exception that neither raise one nor say beside them where it goes."""
        breaches = []
        for module in self.modules.values():
            lines = module.source.splitlines()
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ExceptHandler):
                    kinds = [node.type] if node.type is not None else [ast.Name("BaseException")]
                    raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                elif isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
                    kinds, raises = node.args, False
                else:
                    continue
                kinds = [each for kind in kinds for each in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
                is_broad = any(_last_name(kind) in ("Exception", "BaseException") for kind in kinds)
                if is_broad and not raises and "  # " not in lines[node.lineno - 1]:
                    breaches.append(f"{module.name}:{node.lineno} catches every exception and does not say why")
        return breaches

    def prints(self) -> list[str]:
        return [
            f"{module.name}:{node.lineno} prints"
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]

    def long_files(self) -> list[str]:
        lengths = {module.name: module.source.count("\n") for module in self.modules.values()}
        return [
            f"{name} has {length} lines: does it still say one thing?"
            for name, length in lengths.items()
            if length > MAX_LINES
        ]

    def busy_packages(self) -> list[str]:
        return [
            f"{module.name}/__init__.py:{node.lineno} does more than hand names on"
            for module in self.modules.values()
            if module.is_package and module.name not in DOES_MORE_THAN_HAND_ON
            for node in module.tree.body
            if not (
                isinstance(node, ast.Import | ast.ImportFrom)
                or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                or (isinstance(node, ast.Assign) and [_last_name(target) for target in node.targets] == ["__all__"])
            )
        ]


def unit_of(module: str) -> str:
    """The longest name of the table that the module lies within."""
    return max((unit for unit in BELOW if within(module, unit)), key=len)


def units_below(unit: str) -> set[str]:
    """Every unit that can be reached downward."""
    return {reached for below in BELOW[unit] for reached in {below} | units_below(below)}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _is_private(name: str) -> bool:
    return name.startswith("_")


def _methods(owner: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """An @overload or a setter: the definition beside it carries the docstring."""
    return any(_last_name(decorator) in ("overload", "setter") for decorator in node.decorator_list)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}
