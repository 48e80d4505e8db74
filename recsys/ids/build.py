"""Mappings of ids and routes to experts, built from the config of tables."""

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from recsys.config import IdMappingType, TableConfig
from recsys.config.choices import Route as Choice
from recsys.errors import UserError
from recsys.ids.index import VocabularyMapping
from recsys.ids.kept_rows import KeptRows, PrunedMapping
from recsys.ids.mappings import HashMapping, IdentityMapping, IdMapping, QuotientRemainderMapping
from recsys.ids.routes import FrequencyRoute, HashRoute, Route


def build_mapping(table: TableConfig, vocabulary: pa.Array | None = None, kept: KeptRows | None = None) -> IdMapping:
    """Return the mapping that a table's config asks for.

    Args:
        vocabulary: the ids with rows of their own, in the order of the rows; needed by mapping: vocabulary.
        kept: for a pruned table, the rows kept; num_embeddings is then the number of rows after pruning.

    Raises:
        UserError: num_embeddings is too small.
    """
    if kept is not None:
        return PrunedMapping(build_mapping(replace(table, num_embeddings=kept.num_before), vocabulary), kept)
    if table.mapping is IdMappingType.identity:
        return IdentityMapping(table.num_embeddings)
    if table.mapping is IdMappingType.quotient_remainder:
        if table.num_ids is None:
            raise UserError("mapping: quotient_remainder needs num_ids, which is not set; set it to the number of ids")
        return QuotientRemainderMapping(table.num_embeddings, table.num_ids, table.hash_seed)
    if table.mapping is IdMappingType.vocabulary:
        if vocabulary is None:
            raise ValueError("mapping: vocabulary is built with a vocabulary")
        mapping = VocabularyMapping(vocabulary, table.num_buckets, table.hash_seed)
        if mapping.num_rows > table.num_embeddings:
            raise UserError(
                f"a vocabulary of {len(vocabulary)} ids with num_buckets: {table.num_buckets} needs {mapping.num_rows} "
                f"rows, but num_embeddings: {table.num_embeddings} is less; raise num_embeddings"
            )
        return mapping
    return HashMapping(table.num_embeddings, table.hash_seed, table.num_hashes)


def build_routes(tables: Mapping[str, TableConfig], mappings: Mapping[str, IdMapping]) -> dict[str, Route]:
    """Return for each table that is an expert its route, which chooses the ids that it is looked up for.

    Args:
        mappings: by table. Before vocabularies are known, these are hashes, and experts get equal shares of the ids.
    """
    routes: dict[str, Route] = {}
    for name, table in tables.items():
        if table.experts is None:
            continue
        names = [name, *table.experts.others]
        vocabularies = [mapping for mapping in map(mappings.get, names) if isinstance(mapping, VocabularyMapping)]
        last = len(names) - 1
        for place, expert in enumerate(names):
            if table.experts.by is Choice.hash or len(vocabularies) < last:
                routes[expert] = HashRoute(len(names), table.experts.active, place)
            else:
                routes[expert] = FrequencyRoute(vocabularies[:place], vocabularies[place] if place < last else None)
    return routes
