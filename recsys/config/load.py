"""YAML plus `key=value` into a checked `Config`; every mistake is one sentence that names the full key."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from recsys.config.checks import check_config
from recsys.config.schema import MODELS, Config
from recsys.errors import UserError, nearest

# What --debug sets beneath the user's own `key=value`: one thread, no reading ahead, a slice of the data.
DEBUG_OVERRIDES = {
    "debug": True,
    "data": {"num_threads": 0, "prefetch_batches": 0, "max_rows": 20_000},
    "train": {"max_steps": 200, "log_every_steps": 10},
}


def load_config(path: str | Path, overrides: Sequence[str] = (), debug: bool = False) -> Config:
    """Read a YAML config, merge `key=value` overrides into it, and check it.

    Args:
        path: YAML file.
        overrides: `dotted.key=value` strings; the value is parsed as YAML and wins over the file.
        debug: put the settings of the debug mode between the file and the overrides.

    Raises:
        UserError: unreadable file, unknown key, wrong type, missing value, or parts that do not fit.
    """
    layers = [_read_yaml(Path(path)), DEBUG_OVERRIDES if debug else {}, *map(_parse_override, overrides)]
    _check_sections(layers)
    schema = OmegaConf.structured(Config())
    schema.model = OmegaConf.structured(_model_schema(layers)())
    try:
        merged = OmegaConf.merge(schema, *layers)
        config = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise UserError(_unknown_key(error)) from error
    except MissingMandatoryValue as error:
        raise UserError(_missing_value(error)) from error
    except (OmegaConfBaseException, TypeError) as error:
        raise UserError(_wrong_value(error)) from error
    assert isinstance(config, Config)
    if config.run.name is None:
        config.run.name = Path(path).stem
    check_config(config)
    return config


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML that `load_config` reads back to an equal `Config`."""
    OmegaConf.save(OmegaConf.structured(config), path)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = [str(p) for p in sorted(path.parent.glob("*.yaml"))] if path.parent.is_dir() else []
        there = f"; there are: {', '.join(near)}" if near else ""
        raise UserError(f"config file '{path}' does not exist{nearest(str(path), near) or there}")
    try:
        # OmegaConf's loader, not plain yaml: it reads 1e-3 as a number and refuses a key given twice.
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise UserError(f"config file '{path}' is not readable YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"config file '{path}' must hold keys and values, found a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, _ = text.partition("=")
    if not separator or not key.strip():
        raise UserError(f"'{text}' is not of the form key=value, such as train.epochs=3")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"the value of '{text}' is not readable YAML: {_one_line(error)}") from error
    assert isinstance(parsed, dict)
    return {str(k): v for k, v in parsed.items()}


def _model_schema(layers: Sequence[dict[str, Any]]) -> type:
    name = None
    for layer in layers:
        model = layer.get("model")
        if isinstance(model, dict):
            name = model.get("name", name)
    if name not in MODELS:
        found = "it is not set" if name is None else f"'{name}' is not known"
        hint = nearest(str(name), MODELS)
        raise UserError(f"model.name: {found}, allowed are {', '.join(MODELS)}{hint}")
    return MODELS[name]


def _children(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _all_keys() -> list[str]:
    config = DictConfig(OmegaConf.structured(Config()))
    sections = {name: config._get_node(name) for name in _children(Config)}
    keys = []
    for name, node in sections.items():
        keys += [name] + [f"{name}.{child}" for child in (node if isinstance(node, DictConfig) else [])]
    return keys


def _unknown_key(error: ConfigKeyError) -> str:
    key, leaf = str(error.full_key), str(error.key)
    allowed = _children(error.object_type)
    elsewhere = [k for k in _all_keys() if k.rpartition(".")[2] == leaf]
    hint = f"; did you mean '{elsewhere[0]}'?" if elsewhere else ""
    parent = key.rpartition(".")[0]
    listed = f"allowed under {parent}" if parent else "allowed at the top level"
    return f"config key '{key}' is not known{nearest(leaf, allowed) or hint} ({listed}: {', '.join(allowed)})"


def _missing_value(error: MissingMandatoryValue) -> str:
    parent, _, leaf = str(error.full_key).rpartition(".")
    section, _, name = parent.partition(".")
    siblings = ""
    if section in ("tables", "features") and error.parent_node is not None:
        container = error.parent_node._get_parent()
        others = [str(k) for k in container if str(k) != name] if isinstance(container, DictConfig) else []
        siblings = nearest(name, others)
    return f"config key '{error.full_key}' has no value, and needs one ({leaf} has no default){siblings}"


def _wrong_value(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    text = _one_line(error).split(" full_key:")[0].strip()
    if key:
        return f"config key '{key}': {text[0].lower() + text[1:]}"
    return f"the config cannot be read: {text}"


def _check_sections(layers: Sequence[dict[str, Any]]) -> None:
    """Refuse a plain value where a section should be; OmegaConf does not say where it met one."""
    for layer in layers:
        for name, value in layer.items():
            if name in ("seed", "debug") or name not in _children(Config):
                continue
            _check_section(name, value)
            if name in ("features", "tables"):
                for child, entry in value.items():
                    _check_section(f"{name}.{child}", entry)


def _check_section(key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise UserError(f"config key '{key}' must be a section of keys, found {value!r}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
