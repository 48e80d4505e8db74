"""Print the pinned packages of the CPU or the CUDA set, one a line: requirements.py cpu|cuda [oldest|newest].

pyproject.toml holds both, as extras. The CPU set has fbgemm-gpu-cpu in place of fbgemm-gpu; torchrec is in both, and
has to be installed without its dependencies in the CPU set.
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


def requirements(kind: str, name: str | None = None) -> list[str]:
    """Return the pins of the CPU or the CUDA set, torchrec's too, and those of all extras.

    Args:
        name: of the set of `tool.recsys.sets` whose versions are taken in place of the others.
    """
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, others = content["project"], content["tool"]["recsys"]["sets"][name] if name else []
    instead = {pin.partition("==")[0]: pin for pin in others}
    extras = project["optional-dependencies"]
    torchrec = [pin for pin in extras["cuda"] if pin.startswith("torchrec==")]
    wanted = ("torch", kind, "threads", "faiss", "export", "sweep", "docs", "tensorboard", "dev")
    pins = [*project["dependencies"], *(pin for extra in wanted for pin in extras[extra]), *torchrec]
    return [instead.get(pin.partition("==")[0], pin) for pin in dict.fromkeys(pins) if not pin.startswith("recsys[")]


def main() -> None:
    kind, *names = sys.argv[1:] or [""]
    if kind not in ("cpu", "cuda") or names not in ([], ["oldest"], ["newest"]):
        sys.exit("usage: python scripts/requirements.py cpu|cuda [oldest|newest]")
    print(f"# {kind} set for Python {platform.python_version()} in {ROOT}", *requirements(kind, *names), sep="\n")


if __name__ == "__main__":
    main()
