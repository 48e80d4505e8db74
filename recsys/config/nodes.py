"""OmegaConf's nodes of all keys, with their types and defaults, into which a user's layers are merged.

OmegaConf takes 4 ms to make the node of one feature or table, more than half the time of most loads. So one is made
once and pickled, and the others are unpickled, each in a tenth of a millisecond.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from recsys.config.schema import Config, FeatureConfig, TableConfig

_ELEMENTS = {"features": FeatureConfig, "tables": TableConfig}


def nodes_of(model: DictConfig, layers: Sequence[Mapping[str, Any]]) -> DictConfig:
    """Return nodes of all keys, with `model` as section `model`, and one for each feature and table in the layers."""
    root = pickle.loads(_pickled(Config))
    root.model = model
    for section, element in _ELEMENTS.items():
        if names := _names(layer[section] for layer in layers if section in layer):
            root[section] = {}
            with flag_override(root[section], "no_deepcopy_set_nodes", True):
                for name in names:
                    root[section][name] = pickle.loads(_pickled(element))
    return root


def _names(sections: Iterable[Any]) -> list[str]:
    """Return the names in sections, in the order of merging, up to the first that is not text or no section."""
    names: dict[str, None] = {}
    for section in sections:
        for name, value in section.items() if isinstance(section, dict) else [(None, section)]:
            if not isinstance(name, str) or not isinstance(value, dict):
                return list(names)
            names[name] = None
    return list(names)


@cache
def _pickled(section: type) -> bytes:
    return pickle.dumps(OmegaConf.structured(section))
