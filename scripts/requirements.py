"""Print the pinned packages of the CPU or the CUDA set, one a line: python scripts/requirements.py cpu|cuda.

pyproject.toml holds the CUDA set. The CPU set is the same with fbgemm-gpu-cpu in place of fbgemm-gpu.
The first line, a comment, says for what the list was made; setup.sh keeps the whole text to see changes.
"""

import platform
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib  # Python 3.10 has no TOML reader of its own, its pip has

ROOT = Path(__file__).resolve().parent.parent


def requirements(kind: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    if kind == "cpu":
        pins = [pin.replace("fbgemm-gpu==", "fbgemm-gpu-cpu==") for pin in pins]
    return pins


def main() -> None:
    if sys.argv[1:] not in (["cpu"], ["cuda"]):
        sys.exit("usage: python scripts/requirements.py cpu|cuda")
    kind = sys.argv[1]
    print(f"# {kind} set for Python {platform.python_version()} in {ROOT}", *requirements(kind), sep="\n")


if __name__ == "__main__":
    main()
