"""Loading of a config: YAML plus `key=value` into a checked `Config`; a mistake is a sentence with the full key."""

import dataclasses
import os
import re
import typing
from collections.abc import Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import (
    InterpolationResolutionError,
    InterpolationValidationError,
    KeyValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from recsys.config.checks import check_config
from recsys.config.experts import add_expert_features
from recsys.config.keys import fields_of, required_type, unknown_key
from recsys.config.model import find_model
from recsys.config.names import MOST_YAML_NODES, run_name_of
from recsys.config.nodes import nodes_of
from recsys.config.ranges import expand_override, without_ranges
from recsys.config.removals import without_removed
from recsys.config.schema import Config
from recsys.config.values import plain, refuse_comment
from recsys.errors import UserError, nearest

# Settings of --debug, which the user's own `key=value` override: one thread, no reading ahead, a slice of the data.
DEBUG_OVERRIDES = {
    "debug": True,
    "data": {"num_threads": 0, "prefetch_batches": 0, "max_rows": 20_000},
    "train": {"max_steps": 200, "epochs": 200, "log_every_steps": 10},
}


def load_config(
    path: str | Path, overrides: Sequence[str] = (), debug: bool = False, trust_code: bool = True
) -> Config:
    """Read a YAML config over its `base`, merge `key=value` overrides into it, and check it.

    Args:
        path: YAML file. Its key `base` may name another, relative to itself, which holds what this one leaves out:
            mappings are merged key by key, lists and values are replaced. A feature, table or label that is null, also
            by an override, is removed.
        overrides: `dotted.key=value` strings; the value is parsed as YAML and wins over the file.
        debug: put the settings of the debug mode between the file and the overrides.
        trust_code: a class that model.name names by its dotted name may be imported.

    Raises:
        UserError: unreadable file, unknown key, wrong type, missing value, or parts that do not fit.
    """
    changes = [change for text in overrides for change in expand_override(text)]
    read = [*_read_with_bases(Path(path)), DEBUG_OVERRIDES if debug else {}, *map(_parse_override, changes)]
    layers = without_removed([_with_label_sections(layer) for content in read for layer in without_ranges(content)])
    name = _model_name(layers)
    for layer in layers:
        _check_keys({key: value for key, value in layer.items() if key != "model"}, "", Config, None)
    model = find_model(name, trust_code).Config
    for layer in layers:
        _check_keys(layer, "", Config, model)
    try:
        merged = OmegaConf.unsafe_merge(nodes_of(_model_nodes(model), layers), *layers)
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise UserError(_missing_value(error)) from error
    except (OmegaConfBaseException, TypeError) as error:
        raise UserError(_wrong_value(error, model)) from error
    assert isinstance(config, Config)
    written = OmegaConf.to_container(merged)
    config.given = (written, OmegaConf.to_container(merged, resolve=True) if "${" in str(written) else written)
    if config.run.name is None:
        config.run.name = run_name_of(Path(path))
    check_config(config)
    add_expert_features(config)
    return config


@cache
def _model_nodes(model: type) -> DictConfig:
    """Return OmegaConf's nodes of a section `model`: its keys with types and defaults."""
    try:
        return OmegaConf.structured(model())
    except (OmegaConfBaseException, TypeError) as error:
        key = ".".join(["model", *filter(None, [getattr(error, "full_key", None)])])
        raise UserError(
            f"config key '{key}': the default in class {model.__qualname__}: {_library_text(error)}"
        ) from error


def _with_label_sections(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a layer with labels of the short form, NAME: TEXT, written out as sections with a column or expression."""
    labels = layer["data"].get("labels") if isinstance(layer.get("data"), dict) else None
    if not isinstance(labels, dict):
        return layer
    sections = dict(labels)
    for name, text in labels.items():
        if isinstance(text, str):
            key, other = ("column", "expression") if re.fullmatch(r"[\w.-]+", text) else ("expression", "column")
            sections[name] = {key: text, other: None}  # None overrides the value of a layer below
    return {**layer, "data": {**layer["data"], "labels": sections}}


def config_text(config: Config) -> str:
    """Return the config as YAML that `load_config` reads back to an equal `Config`.

    A value written as `${oc.env:NAME}` stays like that, as it may be a secret.
    """
    features = {name: feature for name, feature in config.features.items() if feature.expert_of is None}
    now = _with_references(plain(dataclasses.replace(config, features=features)), *config.given)
    # The same as OmegaConf.to_yaml, which spends four fifths of its time on making a node of each value.
    return yaml.dump(now, Dumper=get_omega_conf_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)


def _with_references(now: Any, written: Any, resolved: Any) -> Any:
    """Return values (`now`) as they were `written`, with `${…}` references, except those changed since (`resolved`)."""
    if isinstance(written, str) and "${" in written:
        return written if now == plain(resolved) else now
    if isinstance(written, dict) and isinstance(now, dict):
        return {key: _with_references(value, written.get(key), resolved.get(key)) for key, value in now.items()}
    if isinstance(written, list) and isinstance(now, list) and len(now) == len(written):
        return [_with_references(*values) for values in zip(now, written, resolved, strict=True)]
    return now


def _read_with_bases(path: Path, above: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """Return the layers of a file's chain of bases, then the file, which wins; `above` are the files based on it."""
    content = _read_yaml(path)
    base = content.pop("base", None)
    if base is None:
        return [content]
    if not isinstance(base, str):
        raise UserError(f"config file '{path}': base must name one YAML file, found {_show(base)}")
    above = (*above, path.resolve())
    if (path.parent / base).resolve() in above:
        raise UserError(
            f"config file '{path}' has the base '{base}', which is itself based on it; remove one of the two"
        )
    try:
        layers = _read_with_bases(path.parent / base, above)
    except UserError as error:
        raise UserError(f"{error} (it is the base of '{path}')") from error
    if _model_name([content]) not in ("", _model_name(layers)):  # another model has other keys
        layers = [{key: value for key, value in layer.items() if key != "model"} for layer in layers]
    return [*layers, content]


def _read_yaml(path: Path) -> dict[str, Any]:
    if not os.path.exists(path) or path.is_dir():
        folder = path if os.path.isdir(path) else path.parent
        near = [str(p) for p in sorted(folder.glob("*.yaml"))]
        more = ", …" if len(near) > 8 else ""
        others = f"; there are: {', '.join(near[:8])}{more}" if near else ""
        wrong = "is a folder, not a file" if folder == path else "does not exist"
        raise UserError(f"config file '{path}' {wrong}{nearest(str(path), near) or others}")
    try:
        # OmegaConf's loader, not plain yaml: it reads 1e-3 as a number and refuses a key given twice.
        content = OmegaConf.to_container(OmegaConf.load(path, max_yaml_expanded_nodes=MOST_YAML_NODES))
    except KeyValidationError as error:
        raise UserError(_wrong_name(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"config file '{path}' is not readable YAML: {_one_line(error)}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"config file '{path}' must hold keys and values, found {content or 'nothing'}")
    return {str(key): value for key, value in content.items()}


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, value = text.partition("=")
    if key.strip() == "base":
        raise UserError(f"'{text}': base is for config files only, not for the command line; write it into the config")
    if not separator or not all(name.strip() for name in key.split(".")) or "[" in key:
        raise UserError(f"'{text}' is not of the form key=value, such as train.epochs=3")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
        refuse_comment(value)
    except KeyValidationError as error:
        raise UserError(_wrong_name(error)) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(f"the value of '{text}' is not readable YAML: {_one_line(error)}") from error
    assert isinstance(parsed, dict)
    return {str(k): v for k, v in parsed.items()}


def _model_name(layers: Sequence[dict[str, Any]]) -> str:
    names = [layer["model"].get("name", "") for layer in layers if isinstance(layer.get("model"), dict)]
    return next((str(name) for name in reversed(names) if name), "")


def _check_keys(section: Any, key: str, expected: Any, model: type | None) -> None:
    """Refuse unknown keys, and plain values instead of sections, which OmegaConf reports less clearly."""
    fields, is_mapping = fields_of(expected, model), expected is dict or typing.get_origin(expected) is dict
    required, is_count = required_type(expected), isinstance(section, int | float) and section not in (0, 1)
    if section is None and expected != required:
        return
    if (typing.get_origin(required) is list and not _is_list(section)) or (required is bool and is_count):
        raise UserError(f"config key '{key}' must be {_describe(required)}, found {_show(section)}")
    if not (fields or is_mapping):
        return
    if not isinstance(section, dict):
        raise UserError(f"config key '{key}' must be a section of keys, found {_show(section)}")
    for name, value in section.items():
        full = f"{key}.{name}" if key else str(name)
        if fields and name not in fields:
            allowed = [*fields, "base"] if expected is Config else list(fields)
            raise UserError(unknown_key(key, str(name), allowed, model))
        _check_keys(value, full, fields[name] if fields else (typing.get_args(expected) or [None])[-1], model)


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of plain values, or a reference, which may refer to one."""
    if isinstance(value, list):
        return not any(isinstance(item, list | dict) for item in value)
    return isinstance(value, str) and "${" in value


def _missing_value(error: MissingMandatoryValue) -> str:
    parent, _, leaf = str(error.full_key).rpartition(".")
    section, _, name = parent.partition(".")
    siblings = ""
    if section in ("tables", "features") and error.parent_node is not None:
        container = error.parent_node._get_parent()
        others = [str(k) for k in container if str(k) != name] if isinstance(container, DictConfig) else []
        siblings = nearest(name, others, f"{section}.")
    return f"config key '{error.full_key}' has no value, and needs one ({leaf} has no default){siblings}"


def _wrong_value(error: Exception, model: type) -> str:
    key = str(getattr(error, "full_key", None) or "")
    if isinstance(error, KeyValidationError):
        return _wrong_name(error)
    expected = _type_of(key, model) if key else None
    if isinstance(error, ValidationError) and expected and not isinstance(error, InterpolationResolutionError):
        value = getattr(error, "value", None)
        hint = (
            nearest({"gpu": "cuda"}.get(str(value), str(value)), expected.__members__)  # else it is like cpu
            if isinstance(expected, type) and issubclass(expected, Enum)
            else ""
        )
        return f"config key '{key}' must be {_describe(expected)}, found {_show(value)}{hint}"
    where = f"config key '{key}'" if key else "the config cannot be read"
    if isinstance(error, InterpolationValidationError):  # its text shows the value, which may be a secret
        return f"{where} must be {_describe(expected)}, and what it refers to is not"
    if missing := re.search(r"Interpolation key '(.*)' not found", str(error)):
        return (
            f"{where}: there is no key '{missing[1]}' for ${{{missing[1]}}} to refer to; write a key with its sections"
        )
    if missing := re.search(r"Environment variable '(.*)' not found", str(error)):
        name = missing[1]
        return f"{where}: the environment variable {name} is not set; set it, or write ${{oc.env:{name},DEFAULT}}"
    return f"{where}: {_library_text(error)}"


def _library_text(error: Exception) -> str:
    """Return the text of an error of OmegaConf, without the key, which it writes in its own way."""
    return _one_line(error).split(" full_key:")[0]


def _wrong_name(error: KeyValidationError) -> str:
    return f"config key '{error.full_key}': every name must be text, found {_show(error.key)}; put it in quotes"


def _type_of(key: str, model: type) -> Any:
    """Return the type of a key; None if it is under a name with a dot, which no table or feature may have."""
    expected: Any = Config
    for name in key.replace("[", ".[").split("."):
        fields = fields_of(expected, model)
        expected = fields.get(name) if fields else next(reversed(typing.get_args(required_type(expected))), None)
        if expected is None:
            return None
    return expected


def _describe(expected: Any) -> str:
    required = required_type(expected)
    if required is not expected:
        return f"{_describe(required)} or null"
    if typing.get_origin(expected) is list:
        return f"a list, each {_describe(typing.get_args(expected)[0])}"
    if isinstance(expected, type) and issubclass(expected, Enum):
        return f"one of {', '.join(expected.__members__)}"
    return {None: "of its type", int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        expected, str(expected)
    )


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
