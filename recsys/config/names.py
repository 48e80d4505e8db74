"""Names of tables, features, labels and runs, which become names of files, modules and tensors."""

import re
from collections.abc import Iterable
from pathlib import Path

from recsys.config.schema import Config
from recsys.config.values import flat, plain
from recsys.errors import UserError, nearest

# Of a config file. OmegaConf's own limit is 10,000, and the saved config of 150 tables has more.
MOST_YAML_NODES = 10_000_000
_MOST_BYTES = 150  # a file system takes 255, and temporary files have longer names
_NAME = re.compile(r"\w[\w-]*")
_RUN_NAME = re.compile(r"\w[\w.-]*")


def check_names(config: Config) -> None:
    """Refuse names that cannot be part of a path, and text that no path may contain, before anything is written.

    Raises:
        UserError: names the key, and what is allowed.
    """
    sections: dict[str, Iterable[str]] = {
        "features": config.features,
        "tables": config.tables,
        "data.labels": config.data.labels,
    }
    for section, names in sections.items():
        for name in names:
            if not _fits(_NAME, name):
                raise UserError(
                    f"config key '{section}': {_shown(name)} is not a valid name; use letters, digits, '_' and "
                    f"'-', {_MOST_BYTES} bytes at most, and no '-' first (its 'column' may name any column, and alike "
                    f"names in a row are written as C{{1..26}})"
                )
    if not _fits(_RUN_NAME, config.run.name or "run"):
        raise UserError(
            f"config key 'run.name': {_shown(config.run.name or '')} is not a valid run name; use letters, digits, "
            f"'_', '-' and '.', {_MOST_BYTES} bytes at most, and a letter or digit first (run.dir may be any path)"
        )
    for key, value in flat("", plain(config)):
        texts = {f"{key}.{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {key: value}
        if wrong := [name for name, text in texts.items() if isinstance(text, str) and "\0" in text]:
            raise UserError(
                f"config key '{wrong[0]}' holds the character NUL, which no path and no name may; remove it"
            )
        for name, text in texts.items():
            if isinstance(text, str) and text.startswith("~/"):
                raise UserError(
                    f"config key '{name}' is {_shown(text)}, and ~ is the home folder in a shell alone, which leaves "
                    f"it as it is behind '='; write ${{oc.env:HOME}}{text[1:]}"
                )
    if config.run.dir == "":
        raise UserError("config key 'run.dir' is an empty text; name a folder, or drop it for runs/NAME-TIME")


def one_of(key: str, name: str, allowed: Iterable[str], what: str) -> None:
    """Raise a UserError unless `name`, given by config key `key`, is among `allowed`."""
    allowed = list(allowed)
    if name not in allowed:
        raise UserError(
            f"config key '{key}': there is no {what} '{name}'{nearest(name, allowed)} (known: {', '.join(allowed)})"
        )


def check_metric_name(prefix: str, metric: str, known: Iterable[str]) -> None:
    """Raise a UserError, which begins with `prefix`, unless training computes a metric."""
    known = list(known)
    if metric.rpartition(".")[2] == "gauc" and metric not in known:
        raise UserError(
            f"{prefix}: gauc is computed after training, by `recsys evaluate RUN --group COLUMN`; here, name one of "
            f"{', '.join(known)}"
        )
    if metric not in known:
        raise UserError(f"{prefix}: there is no metric '{metric}'{nearest(metric, known)} (known: {', '.join(known)})")


def run_name_of(path: Path) -> str:
    """Return the default name of a run, from the path of its config file."""
    return re.sub(r"[^\w.-]|^[.-]", "_", path.stem)[:30]


def _fits(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(name) is not None and len(name.encode()) <= _MOST_BYTES


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 40 else f"{name[:40]!r} … of {len(name)} characters"
