"""The rules that the tree keeps: import direction, an import that does nothing, licence, file tree, style."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "fastlm").rglob("*.py"))
NAMES = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}

# Every folder may import itself and what stands here; modules beside __init__.py may import everything.
MAY_IMPORT = {
    "kernels": set(),
    "packing": set(),
    "models": {"kernels", "packing"},
    "training": {"kernels", "packing", "models"},
}
RULES = sorted(path for path in SOURCES if path.relative_to(ROOT / "fastlm").parts[0] in MAY_IMPORT)


def imported_parts(path):
    """First component below fastlm of every import in the file, those inside functions too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "fastlm" and len(name) > 1)


@pytest.mark.parametrize("path", RULES, ids=NAMES.get)
def test_imports_point_one_way(path):
    own = path.relative_to(ROOT / "fastlm").parts[0]
    wrong = set(imported_parts(path)) - MAY_IMPORT[own] - {own}
    assert not wrong, f"{NAMES[path]} may not import fastlm.{', fastlm.'.join(sorted(wrong))}"


def test_the_import_rule_sees_every_form():
    assert set(imported_parts(ROOT / "fastlm" / "quickstart.py")) >= {
        "rows",
        "finetune",
        "gguf_weights",
        "loader",
    }


def in_fresh_python(program):
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_fast_silent_and_loads_nothing():
    # Processor time, the best of three: other processes on the machine must not decide this.
    program = (
        "import sys, time; before = set(sys.modules); start = time.process_time(); import fastlm; "
        "took = time.process_time() - start; new = {n.split('.')[0] for n in set(sys.modules) - before}; "
        "assert not new & {'torch', 'transformers', 'trl', 'peft', 'numpy', 'triton'}, new; print(took)"
    )
    outputs = [in_fresh_python(program) for _ in range(3)]
    assert min(float(output) for output in outputs) < 0.5


def test_import_changes_nothing_elsewhere():
    program = """
import sys
import peft, torch, transformers, trl
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

def snapshot():
    modules = {name: {key: id(value) for key, value in vars(module).items()}
               for name, module in sys.modules.items() if not name.startswith("fastlm")}
    tops = Trainer, TrainingArguments, SFTConfig, SFTTrainer, transformers.PreTrainedModel
    classes = {(cls, key): id(value) for top in tops
               for cls in top.__mro__ for key, value in vars(cls).items()}
    return modules, classes

before_modules, before_classes = snapshot()
import fastlm
after_modules, after_classes = snapshot()
assert before_classes == after_classes
assert set(after_modules) - set(before_modules) == set()
changed = {(name, key) for name, values in before_modules.items()
           for key in values.keys() | after_modules[name].keys()
           if values.get(key) != after_modules[name].get(key) and key != "__builtins__"}
changed -= {(name, key) for name, key in changed if name.endswith("main__") or "warningregistry" in key}
assert not changed, changed
"""
    assert in_fresh_python(program) == ""


def test_the_licence_is_apache_2():
    licence = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert len(licence.splitlines()) > 195
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "fastlm" / "py.typed").exists()


def test_the_readme_names_every_file_and_no_other():
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"```\nfastlm/\n(.*?)```", readme, re.DOTALL).group(1)
    folder, named = "", set()
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        if name.endswith("/"):
            folder = name if len(indent) == 2 else folder
            if len(indent) == 0:
                break  # the other top-level folders
        elif name.endswith(".py"):
            named.add((folder if len(indent) == 4 else "") + name)
    files = {path.relative_to(ROOT / "fastlm").as_posix() for path in SOURCES}
    files = {name for name in files if not (name.endswith("__init__.py") and "/" in name)}
    assert named == files


def test_make_runs_what_the_readme_says():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in script and script[-1] == "make test"
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert {"quickstart", "test", "check", "bench", "clean"} <= targets
    assert {"make quickstart", "make test"} <= set(re.findall(r"^make \w+", readme, re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", readme, re.MULTILINE)) <= targets


@pytest.mark.parametrize("path", SOURCES, ids=NAMES.get)
def test_house_style(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 400, "over 400 lines: two things share this file"
    if tree.body:  # an empty __init__.py has nothing to say
        assert ast.get_docstring(tree), "a module says what it does"
    if path.name != "__init__.py":
        targets = [
            name.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for name in node.targets
            if isinstance(name, ast.Name)
        ]
        assert "__all__" in targets, "a module says what it offers"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            bare = isinstance(node.func, ast.Name)
            assert not (called in {"exec", "eval"} and bare), f"line {node.lineno}: {called}"
            assert called not in {"putenv", "setdefault"} or "environ" not in ast.unparse(node.func), (
                f"line {node.lineno}"
            )
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in {"everything", "Exception", "BaseException"}, f"line {node.lineno}: catches {caught}"
        if isinstance(node, ast.Assign):
            assert not any("environ[" in ast.unparse(target) for target in node.targets), f"line {node.lineno}"


# Written in pieces, so that this file does not hold them.
FORBIDDEN = [
    r"(?<![\w.])/wo" + r"rk\b", r"\bsand" + "box", r"\bhelper " + "agent", r"\bissue" + r"s? #?\d",
    r"\bthis " + r"session\b", r"py" + r"pi\.org", r"python" + r"hosted\.org", r"py" + r"torch\.org/whl",
]  # fmt: skip


def test_no_file_tells_where_it_was_written():
    kinds = {".py", ".md", ".toml", ".yaml", ".json"}
    tops = [ROOT / name for name in (".ci", "benchmarks", "fastlm", "tests")]
    files = [path for top in tops for path in top.rglob("*") if path.suffix in kinds or path.parent.name == ".ci"]
    files += [path for path in ROOT.iterdir() if path.suffix in kinds or path.name == "Makefile"]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        for pattern in FORBIDDEN
        for match in re.finditer(pattern, path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 50
    assert not found
