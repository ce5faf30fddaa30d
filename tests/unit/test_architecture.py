"""Who may import whom, what stays light, and how large a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rondo

ROOT = Path(rondo.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    ("packages", "forbidden"),
    [
        (("types", "errors"), ("rondo",)),
        (("trainer", "attention"), ("rondo.engines", "rondo.rollout", "rondo.config", "pydantic")),
        (("engines", "rollout"), ("rondo.trainer", "rondo.attention")),
        (
            ("attention", "engines", "observe", "prompts", "rewards", "rollout", "stream", "trainer", "weights"),
            ("rondo.loop", "rondo.launch", "rondo.cli"),
        ),
        (("prompts", "rewards"), ("torch", "transformers")),
    ],
)
def test_the_import_rule_holds(packages, forbidden):
    for path in FILES:
        if package_of(path) in packages:
            for name in imports(path):
                broken = [word for word in forbidden if name == word or name.startswith(word + ".")]
                assert not broken, f"{path.relative_to(ROOT)} imports {name}"


def test_math_verify_is_imported_by_the_module_that_wraps_it_alone():
    users = [path for path in FILES if any(name.split(".")[0] == "math_verify" for name in imports(path))]
    assert users == [ROOT / "rewards" / "math.py"]


def test_importing_rondo_and_asking_for_help_does_not_import_torch():
    program = "import sys, rondo, rondo.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_trainer_imports_without_pydantic():
    program = """
import sys
sys.modules["pydantic"] = None
import rondo.trainer.trainer, rondo.trainer.checkpoint, rondo.trainer.objective.grpo, rondo.attention.hf
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_public_surface_is_what_it_says():
    public = {name for name in vars(rondo) if not name.startswith("_")}
    modules = {name for name in public if isinstance(vars(rondo)[name], type(sys))}
    assert public - modules - {"annotations", "TYPE_CHECKING", "Path"} == set(rondo.__all__)
    assert all(vars(rondo)[name].__doc__ for name in rondo.__all__)


def test_no_vendor_is_named_outside_the_modules_that_wrap_its_kernels():
    wrapped = {ROOT / "attention" / "varlen.py", ROOT / "attention" / "flex.py"}
    wrapped |= {ROOT / "weights" / "broadcast.py", ROOT / "weights" / "receive.py", ROOT / "config" / "weights.py"}
    wrapped |= {ROOT / "launch" / "build_publisher.py"}  # they name a transport
    for path in set(FILES) - wrapped:
        code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        for literal in ("cuda", "nccl", "npu"):
            assert f'"{literal}' not in code, f"{path.relative_to(ROOT)} names {literal}"


def test_a_metrics_library_is_imported_by_its_sink_alone():
    for path in set(FILES) - {ROOT / "observe" / "sinks.py"}:
        wrapped = {name for name in imports(path) if name.split(".")[0] in ("wandb", "trackio", "tensorboard")}
        assert not wrapped, f"{path.relative_to(ROOT)} imports {wrapped}"


def test_a_report_is_made_without_torch():
    program = """
import sys
import rondo.report.data, rondo.report.page, rondo.report.live, rondo.observe.trace, rondo.observe.verdict
sys.exit('torch' in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_files_and_functions_stay_small():
    for path in FILES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, f"{path.relative_to(ROOT)} has {len(lines)} lines"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 120, f"{path.relative_to(ROOT)}: {node.name}"


def test_the_loop_reads_on_one_page():
    assert len((ROOT / "loop.py").read_text().splitlines()) <= 150
