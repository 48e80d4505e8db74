"""Nodes that are there before a config is merged into them change nothing of what OmegaConf makes of it."""

from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recsys.config.nodes import nodes_of
from recsys.config.schema import Config
from recsys.models.dlrm import DLRM

A: dict[str, Any] = {"table": "t", "max_length": 3}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "none": [{"train": {"epochs": 3}}],
    "one": [{"features": {"b": A, "a": {}}, "tables": {"t": {"num_embeddings": 8}}, "model": {"name": "dlrm"}}],
    "over each other": [{"features": {"b": A}}, {"features": {"c": A, "b": {"table": "u"}}}, {"features": {"a": A}}],
    "missing and given later": [{"tables": {"b": "???", "a": {}}}, {"tables": {"b": {"embedding_dim": 4}}}],
    "null": [{"features": {"b": None, "a": A}}],
    "references": [{"features": {"b": A, "a": "${features.b}"}}, {"features": {"a": {"table": "u"}}}],
    "a whole section": [{"features": {"b": A}}, {"features": "${other}"}],
    "of another type": [{"features": {"b": {"max_length": "three"}}}],
    "names of numbers": [{"features": {1: A}}],
}


def described(node: Any) -> Any:
    """Return what OmegaConf holds of a node: its content in its order, and what may be put there."""
    about = node._metadata
    types = (about.ref_type, about.object_type, about.optional, about.key, getattr(about, "element_type", None))
    if isinstance(node, DictConfig | ListConfig) and isinstance(content := node.__dict__["_content"], dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        assert all(item._get_parent() is node for _, item in items)
        return types, [(key, described(item)) for key, item in items]
    return types, node._value()


@pytest.mark.parametrize("case", LAYERS)
def test_as_omegaconf_merges_without_them(case: str) -> None:
    model = OmegaConf.structured(DLRM.Config())

    def merged(nodes: DictConfig) -> Any:
        try:
            return described(OmegaConf.unsafe_merge(nodes, *LAYERS[case]))
        except OmegaConfBaseException as error:
            return type(error), str(error)

    plain = OmegaConf.structured(Config())
    plain.model = model
    assert merged(nodes_of(model, LAYERS[case])) == merged(plain)
