"""Print the pinned packages of the CPU or the CUDA set, one per line: requirements.py cpu|cuda [oldest|newest].

pyproject.toml holds both, as extras. The CPU set has fbgemm-gpu-cpu instead of fbgemm-gpu; torchrec is in both, and in
the CPU set it must be installed without its dependencies.
The first line, a comment, says what the list was made for; setup.sh keeps the whole text, to notice changes.
"""

import platform
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib  # Python 3.10 has no TOML reader, but its pip has one

ROOT = Path(__file__).resolve().parent.parent


def requirements(kind: str, name: str | None = None) -> list[str]:
    """Return the pins of the CPU or the CUDA set, with torchrec's, and those of all extras.

    Args:
        name: of a set in `tool.recsys.sets` whose versions replace the others.
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
