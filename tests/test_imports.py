"""What `import ckpt` may load. The time it takes is measured by benchmarks/import_time.py."""

import json
import subprocess
import sys

import pytest

HEAVY = ("prefect", "torch", "boto3", "botocore", "aiobotocore", "s3fs", "fsspec", "numpy", "pydantic", "rich")


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter, away from this one's modules, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_ckpt_loads_no_engine_no_framework_and_no_storage_client():
    loaded = set(json.loads(run_python("import ckpt, json, sys; print(json.dumps(sorted(sys.modules)))")))
    assert "ckpt" in loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))


@pytest.mark.parametrize("absent", ["prefect", "torch"])
def test_every_module_of_ckpt_imports_where_prefect_or_torch_is_not_installed(absent: str):
    code = f"""
import sys
sys.modules[{absent!r}] = None  # from here on importing it raises ImportError
import ckpt, importlib, pkgutil
names = [module.name for module in pkgutil.iter_modules(ckpt.__path__)]
for name in names:
    importlib.import_module("ckpt." + name)
print(len(names))
"""
    assert int(run_python(code)) > 0
