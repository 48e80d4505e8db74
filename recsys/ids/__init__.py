"""Raw ids to table rows: hashes, vocabularies, and what the ids of a dataset were.

Every mapping works on whole Arrow columns, and gives an id the same row on every version, machine and number of ranks.
"""

from recsys.ids.hashing import hash_column, hash_integers, is_text, read_keys
from recsys.ids.index import index_bytes
from recsys.ids.mappings import (
    NULL_ROW,
    HashMapping,
    IdentityMapping,
    IdMapping,
    IndexMapping,
    QuotientRemainderMapping,
    VocabularyMapping,
    build_mapping,
)
from recsys.ids.statistics import IdState, IdStatistics, statistics_bytes
from recsys.ids.vocabulary import (
    IdCounter,
    add_up,
    choose_vocabulary,
    is_new,
    joined,
    most_frequent,
    read_vocabulary,
    write_vocabulary,
)

__all__ = [
    "NULL_ROW",
    "HashMapping",
    "IdCounter",
    "IdMapping",
    "IdState",
    "IdStatistics",
    "IdentityMapping",
    "IndexMapping",
    "QuotientRemainderMapping",
    "VocabularyMapping",
    "add_up",
    "build_mapping",
    "choose_vocabulary",
    "hash_column",
    "hash_integers",
    "index_bytes",
    "is_new",
    "is_text",
    "joined",
    "most_frequent",
    "read_keys",
    "read_vocabulary",
    "statistics_bytes",
    "write_vocabulary",
]
