"""Raw ids to table rows: the same number or text gives the same row, whatever Arrow calls it, for ever."""

import numpy as np
import pyarrow as pa
import pytest

from recsys.config import IdMappingType, TableConfig
from recsys.errors import UserError
from recsys.id_mapping import HashMapping, IdentityMapping, IndexMapping, build_mapping, hash_column, hash_integers

SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXT = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
NUMBERS = [0, 1, 5, 100, 127, 128, 300, 2**31, 2**32 + 7, 2**53 + 1, 2**63 - 1, -1, -128, -(2**31), -(2**63)]


def bounds(kind: pa.DataType) -> tuple[int, int]:
    limits = np.iinfo(kind.to_pandas_dtype())
    return int(limits.min), int(limits.max)


# Published first outputs of SplitMix64 from state 0: the k-th is our hash of 0 with seed k - 1.
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


def test_integers_are_splitmix64():
    assert [int(hash_integers(np.array([0]), seed)[0]) for seed in range(4)] == SPLITMIX64


def reference_hash(number: int, seed: int) -> int:
    """SplitMix64's finalizer in Python's own integers."""
    x = (number + 0x9E3779B97F4A7C15 * (seed + 1)) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
def test_integers_of_any_width_hash_alike(seed):
    for kind in SIGNED + UNSIGNED:
        low, high = bounds(kind)
        numbers = [number for number in NUMBERS if low <= number <= high]
        hashed = hash_column(pa.array(numbers, kind), seed)
        assert hashed.dtype == np.uint64
        assert hashed.tolist() == [reference_hash(number, seed) for number in numbers]


def test_big_unsigned_ids():
    numbers = [2**63, 2**64 - 1]
    assert hash_column(pa.array(numbers, pa.uint64())).tolist() == [reference_hash(n, 0) for n in numbers]


# text, hash with seed 0 (published for "" and "a"), with seed 7
XXH3 = [
    ("", 0x2D06800538D394C2, 0x913AE0873E9B7EB8),
    ("a", 0xE6C632B61E964E1F, 0x9ED5888BC5A2A094),
    ("item_42", 0x0E4AEA06BBB1E88B, 0x8E0B13F8886A11D4),
    ("Ä-ツ", 0xF912E16DB70D513A, 0xB7A572384D484B75),
    ("x" * 300, 0xA5D1B4607DC83554, 0x65AFA05E0F083A41),
]


@pytest.mark.parametrize("kind", TEXT, ids=str)
def test_text_is_xxh3_over_utf8(kind):
    column = pa.array([text for text, _, _ in XXH3]).cast(kind)
    assert hash_column(column, 0).tolist() == [hashed for _, hashed, _ in XXH3]
    assert hash_column(column, 7).tolist() == [hashed for _, _, hashed in XXH3]


def test_rows_of_earlier_versions():
    # A trained table is worth nothing once its ids go to other rows.
    numbers = HashMapping(1000, 3)(pa.array([0, 1, -1, 42, 2**40]))
    texts = HashMapping(1000, 3)(pa.array(["", "a", "item_42"]))
    assert numbers.tolist() == [683, 777, 946, 892, 67]
    assert texts.tolist() == [259, 318, 169]


def test_booleans_are_zero_and_one():
    assert hash_column(pa.array([True, False, True])).tolist() == hash_column(pa.array([1, 0, 1])).tolist()


@pytest.mark.parametrize("values", [[5, -7, 5, 2**40], ["x", "y", "x", ""], [b"\xff", b"", b"\xff", b"a"]])
@pytest.mark.parametrize("index", [pa.int8(), pa.uint32(), pa.int64()], ids=str)
def test_dictionary_columns_hash_as_their_values(values, index):
    plain = pa.array(values)
    encoded = plain.dictionary_encode()
    encoded = pa.DictionaryArray.from_arrays(encoded.indices.cast(index), encoded.dictionary)
    assert hash_column(encoded, 3).tolist() == hash_column(plain, 3).tolist()
    assert hash_column(encoded[1:3], 3).tolist() == hash_column(plain, 3)[1:3].tolist()


@pytest.mark.parametrize("kind", [pa.int16(), pa.uint64(), pa.bool_(), *TEXT], ids=str)
def test_slices_hash_as_their_rows(kind):
    text = [str(i % 2) if kind in TEXT else i % 2 for i in range(20)]
    column = pa.array(text).cast(kind)
    whole = hash_column(column)
    assert hash_column(column[3:11]).tolist() == whole[3:11].tolist()
    assert hash_column(column[20:]).tolist() == []
    assert len(set(whole.tolist())) == 2


@pytest.mark.parametrize("column", [[1.5], [None], [[1]], [{"a": 1}]], ids=str)
def test_other_types_are_refused(column):
    with pytest.raises(TypeError, match="ids must be integers or strings, found "):
        hash_column(pa.array(column))


@pytest.mark.parametrize("ids", [list(range(20_000)), list(range(0, 2**40, 2**26)), [f"u{i}" for i in range(20_000)]])
def test_hash_spreads_evenly_and_leaves_row_zero(ids):
    num_embeddings = 101
    rows = HashMapping(num_embeddings, 0)(pa.array(ids))
    assert rows.dtype == np.int64
    counts = np.bincount(rows, minlength=num_embeddings)
    assert len(counts) == num_embeddings
    assert counts[0] == 0
    expected = len(ids) / (num_embeddings - 1)
    chi_square = ((counts[1:] - expected) ** 2 / expected).sum()
    assert chi_square < 170  # 99 degrees of freedom: 1e-5 of all seeds would exceed it


def test_seeds_are_independent():
    ids = pa.array(range(10_000))
    same = (HashMapping(101, 0)(ids) == HashMapping(101, 1)(ids)).mean()
    assert 0.005 < same < 0.016


def test_smallest_hashed_table_has_one_row_for_ids():
    assert HashMapping(2, 0)(pa.array([1, -5, 2**40])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", SIGNED + UNSIGNED, ids=str)
def test_identity(kind):
    rows = IdentityMapping(5)(pa.array([0, 4, 2], kind))
    assert rows.dtype == np.int64
    assert rows.tolist() == [0, 4, 2]


@pytest.mark.parametrize(("ids", "named"), [([0, 5], "5"), ([-1, 7], "-1"), ([4, 2**40], "1099511627776")])
def test_identity_out_of_range(ids, named):
    with pytest.raises(UserError, match=f"id {named} is outside 0 … 4 .*raise num_embeddings, or use mapping: hash"):
        IdentityMapping(5)(pa.array(ids))


def test_identity_of_a_number_beyond_int64():
    with pytest.raises(UserError, match="id 18446744073709551615 is outside"):
        IdentityMapping(5)(pa.array([2**64 - 1], pa.uint64()))


def test_identity_takes_integers_only():
    with pytest.raises(UserError, match="identity takes integers, found string; use mapping: hash"):
        IdentityMapping(5)(pa.array(["1"]))


@pytest.mark.parametrize("known", [pa.array([30, -1, 20]), pa.array([30, -1, 20]).dictionary_encode()], ids=["", "d"])
def test_index_is_the_position(known):
    assert IndexMapping(known)(pa.array([20, 7, 30, -1, 20])).tolist() == [2, -1, 0, 1, 2]
    assert IndexMapping(known)(pa.array([20, 30], pa.uint8()).dictionary_encode()).tolist() == [2, 0]


def test_index_of_text():
    mapping = IndexMapping(pa.array(["b", "a"]))
    assert mapping(pa.array(["a", "c", "b"], pa.large_string())).tolist() == [1, -1, 0]
    assert mapping(pa.array(["a", "c"]).dictionary_encode()).tolist() == [1, -1]


@pytest.mark.parametrize(
    ("known", "ids", "positions"),
    [
        (pa.array([1, 44], pa.int8()), pa.array([300, 1, -129, 44]), [-1, 0, -1, 1]),
        (pa.array([1, 2**64 - 1], pa.uint64()), pa.array([-1, 1]), [-1, 0]),
        (pa.array([1, -1], pa.int64()), pa.array([2**64 - 1, 1], pa.uint64()), [-1, 0]),
    ],
    ids=["narrow", "negative", "big"],
)
def test_index_of_numbers_beyond_the_type_of_the_list(known, ids, positions):
    assert IndexMapping(known)(ids).tolist() == positions


@pytest.mark.parametrize("ids", [["x"], [{"a": 1}]], ids=["text", "struct"])
def test_index_of_ids_that_do_not_compare(ids):
    with pytest.raises(UserError, match="do not compare with ids of type int64"):
        IndexMapping(pa.array([1, 2]))(pa.array(ids))


def test_build_mapping():
    table = TableConfig(num_embeddings=50, embedding_dim=4, hash_seed=9)
    ids = pa.array([3, 4, 5])
    assert build_mapping(table)(ids).tolist() == HashMapping(50, 9)(ids).tolist()
    table.mapping = IdMappingType.identity
    assert build_mapping(table)(ids).tolist() == [3, 4, 5]
    table.num_embeddings = 5
    with pytest.raises(UserError):
        build_mapping(table)(ids)
