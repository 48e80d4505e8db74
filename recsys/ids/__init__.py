"""Raw ids to table rows: hashes, vocabularies, statistics.

Every mapping works on whole Arrow columns. An id gets the same row in every version, on every machine and any ranks.
"""

from recsys.ids.build import build_mapping, build_routes
from recsys.ids.hashing import (
    NANOSECONDS,
    IdKeys,
    hash_column,
    hash_integers,
    hash_uniform,
    is_number,
    is_text,
    numpy_type,
    numpy_view,
    raw_times,
    read_keys,
)
from recsys.ids.index import IndexMapping, VocabularyMapping, index_bytes
from recsys.ids.kept_rows import KeptRows
from recsys.ids.mappings import (
    NULL_ROW,
    HashMapping,
    IdentityMapping,
    IdMapping,
    QuotientRemainderMapping,
)
from recsys.ids.routes import ROUTE_SEED, FrequencyRoute, HashRoute, Route
from recsys.ids.statistics import IdStatistics, statistics_bytes
from recsys.ids.vocabulary import (
    Grown,
    IdCounter,
    KeptIds,
    add_up,
    choose_vocabulary,
    grow,
    is_new,
    joined,
    num_again,
    read_unseen_runs,
    read_vocabulary,
    write_vocabulary,
)
