"""The operator in the layout of the Hugging Face `kernels` library, for the CPUs of this kind of machine.

    python packaging/hub_kernel.py OUT        # OUT/build/torch-stable-abi26-cpu-x86_64-linux/...
    kernels.get_local_kernel(Path("OUT")).robust_filter_attention(...)

A kernel of that library is a folder that is imported from any path, several versions beside each other. So its imports
are relative, its operators have a name space of their own, and it needs PyTorch alone. This script copies `rfa.ops` and
`rfa.dynamics` with these changes, and adds compiled kernels and `metadata.json`. The library's requirements:
https://huggingface.co/docs/kernels/kernel-requirements
"""

import argparse
import base64
import hashlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "rfa"
NAME = "rfa-attention"
COPIED = ("ops", "dynamics", "checks.py")
ADDED = {
    "__init__.py": '''"""Robust filter attention; see `robust_filter_attention`."""

from .ops import available_backends, robust_filter_attention

__all__ = ["available_backends", "robust_filter_attention"]
''',
    "shapes.py": '''"""Stands in for jaxtyping: the shapes in annotations are for readers."""


class Float:
    """A tensor of a shape."""

    def __class_getitem__(cls, given):
        """The type without the shape."""
        return given[0]


Bool = Complex = Int = Real = Float
''',
    "ops/cpu/build.py": '''"""The kernels of this folder; none are compiled here."""

from pathlib import Path

from .compiler import load_prebuilt


def load_library():
    """The library for this processor."""
    return load_prebuilt(Path(__file__).parent / "kernels")
''',
    # for versions of the library that expect the module in a folder of its name
    NAME.replace("-", "_") + "/__init__.py": """import importlib.util
import json
import sys
from pathlib import Path

_folder = Path(__file__).parents[1]
_name = json.loads((_folder / "metadata.json").read_text())["id"]
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _folder / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({name: getattr(sys.modules[_name], name) for name in sys.modules[_name].__all__})
""",
}


def relocated(text: str, depth: int, space: str) -> str:
    """A module's text with relative imports and operators in the name space `space`.

    Args:
        text: of the module.
        depth: folders between the module and the kernel's folder.
        space: the new name of `torch.ops.rfa`.
    """
    here = "." * (depth + 1)
    text = re.sub(r"^( *)from rfa\.", rf"\1from {here}", text, flags=re.MULTILINE)
    text = re.sub(r"^from jaxtyping import", f"from {here}shapes import", text, flags=re.MULTILINE)
    return re.sub(r"torch\.ops\.rfa\b", f"torch.ops.{space}", text.replace('"rfa::', f'"{space}::'))


def write_layout(out: Path, libraries: Mapping[str, bytes]) -> Path:
    """Write `out/build/<variant>`.

    Args:
        out: the folder of the kernel's repository.
        libraries: the compiled kernels of the operator for each target of `rfa.ops.cpu.compiler.TARGETS`.

    Returns:
        The folder of the variant.
    """
    texts = dict(ADDED)
    for path in [file for name in COPIED for file in sorted([SOURCE / name, *(SOURCE / name).rglob("*.py")])]:
        if path.is_file():
            texts.setdefault(path.relative_to(SOURCE).as_posix(), path.read_text("utf-8"))
    content = hashlib.sha256("\0".join([*texts, *texts.values()]).encode() + b"".join(libraries.values()))
    space = f"_{NAME.replace('-', '_')}_cpu_{content.hexdigest()[:8]}"
    # no symbol of PyTorch is used, so every version that has the Python of these sources will do
    variant = out / "build" / f"torch-stable-abi26-cpu-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    files = {name: relocated(text, name.count("/"), space).encode() for name, text in texts.items()}
    files |= {f"ops/cpu/prebuilt/{target}.so": library for target, library in libraries.items()}
    for name, data in files.items():
        (variant / name).parent.mkdir(parents=True, exist_ok=True)
        (variant / name).write_bytes(data)
    digests = {name: base64.b64encode(hashlib.sha256(files[name]).digest()).decode() for name in sorted(files)}
    metadata = {
        "name": NAME,
        "id": space,
        "version": 0,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return variant


def main() -> None:
    """Compile the kernels and write the layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder of the kernel's repository")
    out = parser.parse_args().out
    sys.path.insert(0, str(SOURCE / "ops" / "cpu"))
    from compiler import TARGETS_OF, BuildError, compile_library, find_compiler  # the standard library alone

    sources, machine = SOURCE / "ops" / "cpu" / "kernels", platform.machine()
    if platform.system() != "Linux" or machine not in TARGETS_OF:
        parser.exit(2, f"rfa: got {platform.system()} on {machine}, expected Linux on {' or '.join(TARGETS_OF)}\n")
    try:
        libraries = {name: compile_library(find_compiler(), sources, out, name) for name in TARGETS_OF[machine]}
    except BuildError as error:
        parser.exit(2, f"rfa: {error}\n")
    print(write_layout(out, libraries))


if __name__ == "__main__":
    main()
