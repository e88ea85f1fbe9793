"""Imports go one way, and private names of vLLM stay in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("vtoken", "service", "loadtest")
INTEGRATION = "vtoken.integration"
COMPAT = "vtoken.integration.vllm.compat"

RANKS: dict[str, int] = {
    "vtoken.types": 0,
    "vtoken.errors": 0,
    "vtoken.bounds": 0,
    "vtoken.config": 1,
    "vtoken.history": 2,
    "vtoken.stats": 1,
    "vtoken.observation": 2,
    "vtoken.request_options": 2,
    "vtoken.table_store": 1,
    "vtoken.live_index": 2,
    "vtoken.token_table": 2,
    "vtoken.occupancy": 2,
    "vtoken.ports": 2,
    "vtoken.kv_view": 2,
    "vtoken.kv_pages": 2,
    "vtoken.policies": 3,
    "vtoken.planner": 2,
    "vtoken.block_cap": 0,
    "vtoken.cache_room": 3,
    "vtoken.shared_planner": 3,
    "vtoken.threshold": 0,
    "vtoken.request_kv": 3,
    "vtoken.kv_pool": 3,
    "vtoken.paged_pool": 3,
    "vtoken.scores": 3,
    "vtoken.gpu_scores": 4,
    "vtoken.signal_rows": 3,
    "vtoken.block_map": 4,
    "vtoken.documents": 4,
    "vtoken.eviction_choice": 4,
    "vtoken.eviction": 5,
    "vtoken.commits": 4,
    "vtoken.reservations": 4,
    "vtoken.reclamation": 5,
    "vtoken.invariants": 4,
    "vtoken.roster": 4,
    "vtoken.preview": 6,
    "vtoken.receipts": 4,
    "vtoken.copy_engine": 4,
    "vtoken.device_check": 5,
    "vtoken.verification": 5,
    "vtoken.policy_control": 7,
    "vtoken.token_layer": 8,
    INTEGRATION: 9,
    "service.fingerprint": 9,
    "service.strict": 9,
    "service.auth_keys": 10,
    "service.settings.layers": 10,
    "service.settings.base": 11,
    "service.settings.environment": 11,
    "service.settings.vllm_variables": 11,
    "service.settings.given": 12,
    "service.settings.client": 13,
    "service.settings.http_process": 13,
    "service.settings.token_layer": 13,
    "service.settings.unknown": 14,
    "service": 15,
}
"""A module imports from lower ranks, and a folder within itself. A new module gets a rank here."""

PLANNER_MAY_IMPORT = {"__future__", "collections", "dataclasses", "numpy", "typing"}


def modules() -> list[str]:
    """Dotted names of all modules of our packages."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths)]
    return [name.removesuffix(".__init__") for name in names]


def tree_of(module: str) -> ast.Module:
    """Its syntax tree."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def imports_of(module: str) -> Iterator[str]:
    """Dotted names that it imports anywhere, ``from a import b`` as ``a.b``."""
    package = module if (ROOT / Path(*module.split("."))).is_dir() else module.rpartition(".")[0]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """The entry of :data:`RANKS` that a dotted name belongs to."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (room := ".".join(parts[:end])) in RANKS:
            return room
    return None


def is_under(name: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module: str) -> None:
    """types, errors ← config, stats ← table ← policies, planner ← … ← integration ← service."""
    if module == "vtoken" or is_under(module, "loadtest"):
        return
    room = room_of(module)
    assert room is not None, f"{module} has no rank: add it to RANKS"
    for name in imports_of(module):
        if not any(is_under(name, package) for package in PACKAGES):
            continue
        used = room_of(name)
        if used is None:  # `from vtoken import x`
            assert is_under(name, "loadtest") is False, f"{module} imports {name}"
            continue
        assert used == room or RANKS[used] < RANKS[room], f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in modules() if is_under(m, "loadtest")])
def test_loadtest_talks_http_only(module: str) -> None:
    """The load test knows neither the engine nor the service."""
    bad = [n for n in imports_of(module) if n.split(".")[0] in ("vtoken", "service", "vllm")]
    assert not bad, f"{module} imports {bad}"


@pytest.mark.parametrize("module", [m for m in modules() if is_under(m, "vtoken")])
def test_only_the_integration_imports_vllm(module: str) -> None:
    """The core runs and is tested without vLLM."""
    if not is_under(module, INTEGRATION):
        assert not [n for n in imports_of(module) if is_under(n, "vllm")]


def test_planner_is_pure() -> None:
    """No torch, clock, logger or I/O: arrays in, arrays out."""
    ours = ("vtoken.types", "vtoken.planner")
    for name in [*imports_of("vtoken.planner"), *imports_of("vtoken.shared_planner")]:
        assert name.split(".")[0] in PLANNER_MAY_IMPORT or any(is_under(name, o) for o in ours), (
            name
        )


@pytest.mark.parametrize("module", ["vtoken.config", "vtoken.token_layer", "vtoken.policies.base"])
def test_core_loads_without_torch(module: str) -> None:
    """The bookkeeping needs numpy only."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for used in imports_of(name):
            assert used.split(".")[0] not in ("torch", "vllm"), f"{name} imports {used}"
            todo += [m for m in (used, used.rpartition(".")[0]) if m in modules()]


def private(name: str) -> bool:
    """``_name``, but neither ``__dunder__`` nor ``_``."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def outside_compat(package: str) -> list[str]:
    """Modules of a package that may not use private names of others."""
    return [m for m in modules() if is_under(m, package) and not is_under(m, COMPAT)]


@pytest.mark.parametrize("module", outside_compat(INTEGRATION))
def test_private_names_of_vllm_appear_in_compat_only(module: str) -> None:
    """No private import from vLLM and no private attribute of anything but ``self``/``cls``."""
    bad = [
        name
        for name in imports_of(module)
        if is_under(name, "vllm") and any(map(private, name.split(".")))
    ]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            bad += [] if own else [f"line {node.lineno}: {ast.unparse(node)}"]
    assert not bad, f"{module}: {bad}"


READS = ("get", "items", "keys", "values", "copy")


def reads_environment(node: ast.AST) -> bool:
    """Whether it looks a variable up, in ``os.environ`` or with ``os.getenv``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "getenv" or (node.attr in READS and is_environ(node.value))
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and is_environ(node.value)
    return isinstance(node, ast.Compare) and any(map(is_environ, node.comparators))


def is_environ(node: ast.AST) -> bool:
    """Whether it is ``os.environ``."""
    return ast.unparse(node) in ("os.environ", "environ")


@pytest.mark.parametrize("module", [m for m in modules() if not is_under(m, "service.settings")])
def test_environment_is_read_in_settings_only(module: str) -> None:
    """Configuration is passed in (habit 7); writing variables for child processes is allowed."""
    reads = [ast.unparse(node) for node in ast.walk(tree_of(module)) if reads_environment(node)]
    assert not reads, f"{module}: {reads}"


@pytest.mark.parametrize(
    "line", ["os.getenv('A')", "os.environ['A']", "os.environ.get('A')", "'A' in os.environ"]
)
def test_a_read_of_the_environment_is_found(line: str) -> None:
    """However it is written."""
    assert any(map(reads_environment, ast.walk(ast.parse(line))))


@pytest.mark.parametrize("line", ["os.environ['A'] = x", "f({**os.environ})", "{}.get('A')"])
def test_a_variable_may_be_written_or_passed_on(line: str) -> None:
    """To the processes to come."""
    assert not any(map(reads_environment, ast.walk(ast.parse(line))))
