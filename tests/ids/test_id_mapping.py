"""Raw ids to table rows: the same number or text gives the same row, whatever Arrow calls it, for ever."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from launch import ROOT

from recsys.config import IdMappingType, TableConfig, load_config
from recsys.errors import UserError
from recsys.ids import (
    HashMapping,
    IdentityMapping,
    IdMapping,
    IdStatistics,
    IndexMapping,
    QuotientRemainderMapping,
    VocabularyMapping,
    build_mapping,
    hash_column,
    hash_integers,
    read_keys,
)
from recsys.serving import score

SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXT = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]
NUMBERS = [0, 1, 5, 100, 127, 128, 300, 2**31, 2**32 + 7, 2**53 + 1, 2**63 - 1, -1, -128, -(2**31), -(2**63)]


def bounds(kind: pa.DataType) -> tuple[int, int]:
    limits = np.iinfo(str(kind))
    return int(limits.min), int(limits.max)


def rows_of(mapping: IdMapping, ids: pa.Array, dtype: type = np.int64) -> np.ndarray:
    out = np.full(len(ids) * mapping.rows_per_id, -77, dtype)
    mapping.map(ids, out)
    return out


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
    numbers = rows_of(HashMapping(1000, 3), pa.array([0, 1, -1, 42, 2**40]))
    texts = rows_of(HashMapping(1000, 3), pa.array(["", "a", "item_42"]))
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


def test_dictionaries_with_entries_that_no_id_has():
    values = pa.array(["x", None, "y", "z"])
    column = pa.DictionaryArray.from_arrays(pa.array([3, 0, 3], pa.int8()), values)
    assert hash_column(column).tolist() == hash_column(pa.array(["z", "x", "z"])).tolist()
    column = pa.DictionaryArray.from_arrays(pa.array([1, 1]), pa.array([0.5, 2.0]))
    assert hash_column(column).tolist() == hash_column(pa.array([2, 2])).tolist()
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([7, 7]))  # nothing forbids this
    assert hash_column(column).tolist() == hash_column(pa.array([7, 7])).tolist()


DAY = 86_400


@pytest.mark.parametrize(
    ("column", "numbers"),
    [
        (pa.array([0, -3, 19_000], pa.int32()).view(pa.date32()), [0, -3 * DAY * 10**9, 19_000 * DAY * 10**9]),
        (pa.array([DAY * 1000], pa.int64()).view(pa.date64()), [DAY * 10**9]),
        (pa.array([5], pa.int32()).view(pa.time32("s")), [5 * 10**9]),
        (pa.array([2**53 + 1], pa.int64()).view(pa.timestamp("us", "UTC")), [(2**53 + 1) * 1000]),
        (pa.array([-7], pa.int64()).view(pa.duration("ms")), [-7]),
        (pa.array([3.0, -0.0, 2.0**53 - 1], pa.float64()), [3, 0, 2**53 - 1]),
        (pa.array([3.0, 2.0**24 - 1], pa.float32()), [3, 2**24 - 1]),
        (pa.array([3.0, 2047.0], pa.float16()), [3, 2047]),
        (pa.array([Decimal(5), Decimal(-(2**62))], pa.decimal128(38, 0)), [5, -(2**62)]),
        (pa.array([Decimal("5.00"), Decimal("-1.00")], pa.decimal64(10, 2)), [5, -1]),
        (pa.array([Decimal(7)], pa.decimal32(5, 0)), [7]),
        (pa.array([Decimal(7)], pa.decimal256(50, 1)), [7]),
        (pa.array([], pa.null()), []),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_other_types_of_numbers_hash_as_their_integers(column, numbers):
    assert hash_column(column, 3).tolist() == [reference_hash(number, 3) for number in numbers]
    assert hash_column(column[1:], 3).tolist() == [reference_hash(number, 3) for number in numbers[1:]]


def test_decimals_that_are_no_integers_hash_as_text():
    values = ["1.50", "4.00", "-0.25", "12345678901234567890123456789012.00", "9223372036854775808.00", "4.00"]
    column = pa.array([Decimal(value) for value in values], pa.decimal128(38, 2))
    text = hash_column(pa.array(["1.5", "-0.25", "12345678901234567890123456789012", "9223372036854775808"])).tolist()
    four = reference_hash(4, 0)
    assert hash_column(column).tolist() == [text[0], four, text[1], text[2], text[3], four]
    assert hash_column(column[1:2]).tolist() == [four]
    finer = pa.array([Decimal("1.500")], pa.decimal256(50, 3))
    assert hash_column(finer.dictionary_encode()).tolist() == text[:1]
    powers = [10**20, 10**21]  # whose zeros stand before the point
    whole, texts = pa.array(powers, pa.decimal128(30, 0)), pa.array(map(str, powers))
    assert hash_column(whole).tolist() == hash_column(texts).tolist()


def test_bytes_of_fixed_size():
    raw = [bytes(range(16)), b"0123456789abcdef"]
    expected = hash_column(pa.array(raw)).tolist()
    assert hash_column(pa.array(raw, pa.binary(16))).tolist() == expected


@pytest.mark.parametrize("column", [[None], [[1]], [{"a": 1}]], ids=str)
def test_other_types_are_refused(column):
    with pytest.raises(TypeError, match="ids must be integers or strings, found "):
        hash_column(pa.array(column))


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (pa.array([1.0, 1.5]), "found 1.5, but double is exact only below 2\\*\\*53;"),
        (pa.array([float("nan")]), "found nan; if a row has no id, write null$"),
        (pa.array([2.0**53]), "found 9007199254740992.0"),  # which 2**53 + 1 becomes
        (pa.array([-(2.0**24)], pa.float32()), "found -16777216.0, but float is exact only below 2\\*\\*24;"),
    ],
)
def test_floats_that_are_no_ids(column, named):
    with pytest.raises(UserError, match=f"ids must be whole numbers, {named}"):
        hash_column(column)


@pytest.mark.parametrize("column", [pa.array([2**60 + 1, None]), pa.array(["a", None]), pa.array([0.0, None])], ids=str)
def test_nulls_never_become_ids(column):
    # As floats, 2**60 + 1 would be 2**60.
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0, 1]), column)
    for nulls in (column, dictionary, column.dictionary_encode()):
        with pytest.raises(ValueError, match="ids hold 1 nulls"):
            hash_column(nulls)


def test_hash_integers_keeps_the_shape():
    values = np.arange(50_000, dtype=np.int16).reshape(2, 5, -1)[:, ::2]
    hashed = hash_integers(values, 5)
    assert hashed.shape == values.shape
    assert hashed[1, 2, 3] == reference_hash(int(values[1, 2, 3]), 5)
    with pytest.raises(TypeError, match="float64"):
        hash_integers(np.array([1.0]))


@pytest.mark.parametrize("ids", [list(range(20_000)), list(range(0, 2**40, 2**26)), [f"u{i}" for i in range(20_000)]])
def test_hash_spreads_evenly_and_leaves_row_zero(ids):
    num_embeddings = 101
    rows = rows_of(HashMapping(num_embeddings, 0), pa.array(ids))
    counts = np.bincount(rows, minlength=num_embeddings)
    assert len(counts) == num_embeddings
    assert counts[0] == 0
    expected = len(ids) / (num_embeddings - 1)
    chi_square = ((counts[1:] - expected) ** 2 / expected).sum()
    assert chi_square < 170  # 99 degrees of freedom: 1e-5 of all seeds would exceed it


def test_seeds_are_independent():
    ids = pa.array(range(10_000))
    same = (rows_of(HashMapping(101, 0), ids) == rows_of(HashMapping(101, 1), ids)).mean()
    assert 0.005 < same < 0.016


def test_smallest_hashed_table_has_one_row_for_ids():
    assert rows_of(HashMapping(2, 0), pa.array([1, -5, 2**40])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", SIGNED + UNSIGNED, ids=str)
def test_identity(kind):
    assert rows_of(IdentityMapping(5), pa.array([0, 4, 2], kind)).tolist() == [0, 4, 2]


@pytest.mark.parametrize(("ids", "named"), [([0, 5], "5"), ([-1, 7], "-1"), ([4, 2**40], "1099511627776")])
def test_identity_out_of_range(ids, named):
    advice = "use mapping: hash" if named == "-1" else "raise num_embeddings, or use mapping: hash"
    with pytest.raises(
        UserError,
        match=rf"id {named} is outside 0 … 4 \(mapping: identity\); {advice}; for a run that is .*data.filter",
    ):
        rows_of(IdentityMapping(5), pa.array(ids))


def test_identity_of_a_number_beyond_int64():
    with pytest.raises(UserError, match="id 18446744073709551615 is outside"):
        rows_of(IdentityMapping(5), pa.array([2**64 - 1], pa.uint64()))


@pytest.mark.parametrize("kind", [pa.string(), pa.date32(), pa.binary(4)], ids=str)
def test_identity_takes_integers_only(kind):
    column = pa.array([b"1234"]).cast(kind) if kind != pa.date32() else pa.array([1], pa.int32()).view(kind)
    for ids in (column, column.dictionary_encode()):
        with pytest.raises(UserError, match=f"identity takes integers, found {kind}".replace("[", "\\[")):
            rows_of(IdentityMapping(5000), ids)


def test_identity_of_other_numbers():
    for column in (pa.array([1.0, 0.0]), pa.array([True, False]), pa.array([1, 0]).dictionary_encode()):
        assert rows_of(IdentityMapping(2), column, np.int32).tolist() == [1, 0]
    unused = pa.DictionaryArray.from_arrays(pa.array([1, 1]), pa.array([99, 4]))
    assert rows_of(IdentityMapping(5), unused).tolist() == [4, 4]


# Longer than the chunks that are worked on at once, and not a multiple of them.
LONG = np.random.default_rng(0).integers(-(2**40), 2**40, 40_000)
MAPPINGS = [
    HashMapping(1000, 3),
    HashMapping(1000, 3, num_hashes=3),
    QuotientRemainderMapping(1000, 100_000, 3),
    VocabularyMapping(pa.array(np.unique(LONG)[::2]), 10, 3),
    IndexMapping(pa.array(np.unique(LONG)[::2])),
]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: f"{type(mapping).__name__}-{mapping.rows_per_id}")
def test_rows_do_not_depend_on_how_ids_come(mapping):
    ids = pa.array(LONG)
    k = mapping.rows_per_id
    rows = rows_of(mapping, ids)
    assert rows.max() < mapping.num_rows
    assert rows_of(mapping, ids, np.int32).tolist() == rows.tolist()
    one_by_one = [rows_of(mapping, ids.slice(i, 1)).tolist() for i in range(0, 40_000, 1999)]
    assert one_by_one == rows.reshape(-1, k)[::1999].tolist()
    assert rows_of(mapping, ids.dictionary_encode(), np.int32).tolist() == rows.tolist()
    statistics = IdStatistics()
    out = np.empty(len(rows), np.int64)
    mapping.map(ids, out, statistics)
    assert out.tolist() == rows.tolist()
    assert statistics.num_ids == 40_000


def test_several_hashes():
    # The first row is that of one hash; the j-th is SplitMix64 of the first hash by seed j.
    rows = rows_of(HashMapping(1000, 3, num_hashes=3), pa.array([42, -1])).reshape(2, 3)
    assert rows[:, 0].tolist() == rows_of(HashMapping(1000, 3), pa.array([42, -1])).tolist()
    first = reference_hash(42, 3)
    assert rows[0].tolist() == [
        1 + reference % 999 for reference in (first, *(reference_hash(first, j) for j in (1, 2)))
    ]
    texts = rows_of(HashMapping(1000, 0, num_hashes=2), pa.array(["a"]))
    assert texts.tolist() == [1 + XXH3[1][1] % 999, 1 + reference_hash(XXH3[1][1], 1) % 999]
    many = rows_of(HashMapping(101, 0, num_hashes=2), pa.array(range(20_000))).reshape(-1, 2)
    assert 0.007 < (many[:, 0] == many[:, 1]).mean() < 0.014


def test_quotient_and_remainder_by_hand():
    # 1 + 2 + 5 <= 8 rows; 3 + 4 or 4 + 3 would do too, but have fewer remainders.
    mapping = QuotientRemainderMapping(8, 10, 0)
    rows = rows_of(mapping, pa.array([0, 1, 2])).reshape(-1, 2)
    numbers = [reference_hash(i, 0) % 10 for i in range(3)]
    assert rows.tolist() == [[1 + number // 5, 3 + number % 5] for number in numbers]


@pytest.mark.parametrize("num_ids", [1, 2, 3, 4, 5, 15, 16, 17, 20, 21, 100, 101, 9999, 10**6, 3 * 10**9])
def test_quotient_remainder_tells_all_numbers_apart(num_ids):
    def pairs(rows: int) -> int:
        return rows // 2 * (rows - rows // 2)

    least = next(rows for rows in range(3, 200_000) if pairs(rows - 1) >= num_ids)
    table = f"tables.user={{mapping: quotient_remainder, num_ids: {num_ids}, num_embeddings: {least - 1}}}"
    with pytest.raises(UserError, match=rf"tables\.user\.num_embeddings' .* ({least} or more|at least 3), found"):
        load_config(ROOT / "configs" / "dlrm_sample.yaml", [table])
    for num_embeddings in (least, least + 1, 2 * least, num_ids + 10):
        mapping = QuotientRemainderMapping(num_embeddings, num_ids, 0)
        ids = np.arange(min(8 * num_ids, 20_000))
        rows = rows_of(mapping, pa.array(ids)).reshape(-1, 2)
        assert rows.min() >= 1
        assert rows.max() < num_embeddings
        assert rows[:, 0].max() < rows[:, 1].min()
        numbers = hash_integers(ids) % np.uint64(num_ids)
        assert len(np.unique(rows, axis=0)) == len(np.unique(numbers))


@pytest.mark.parametrize("out", [np.empty(3, np.int64), np.empty(2, np.float64), np.empty((2, 1), np.int64)])
def test_out_that_does_not_fit(out):
    with pytest.raises(ValueError, match="it must be"):
        HashMapping(10, 0).map(pa.array([1, 2]), out)
    with pytest.raises(ValueError, match="hold rows to 2147483648"):
        IdentityMapping(2**31 + 1).map(pa.array([1, 2]), np.empty(2, np.int32))


def test_build_mapping():
    table = TableConfig(num_embeddings=50, embedding_dim=4, hash_seed=9)
    ids = pa.array([3, 4, 5])
    assert rows_of(build_mapping(table), ids).tolist() == rows_of(HashMapping(50, 9), ids).tolist()
    table.num_hashes = 2
    assert rows_of(build_mapping(table), ids).tolist() == rows_of(HashMapping(50, 9, 2), ids).tolist()
    table.mapping = IdMappingType.quotient_remainder
    with pytest.raises(UserError, match="needs num_ids"):
        build_mapping(table)
    table.num_ids = 500
    expected = rows_of(QuotientRemainderMapping(50, 500, 9), ids)
    assert rows_of(build_mapping(table), ids).tolist() == expected.tolist()
    table.mapping = IdMappingType.identity
    assert rows_of(build_mapping(table), ids).tolist() == [3, 4, 5]
    table.num_embeddings = 5
    with pytest.raises(UserError):
        rows_of(build_mapping(table), ids)


def test_build_mapping_of_a_vocabulary():
    table = TableConfig(num_embeddings=6, embedding_dim=4, hash_seed=9, mapping=IdMappingType.vocabulary, num_buckets=2)
    mapping = build_mapping(table, pa.array([7, 5]))
    assert mapping.num_rows == 5
    assert rows_of(mapping, pa.array([5, 7])).tolist() == [2, 1]
    with pytest.raises(UserError, match=r"vocabulary of 4 ids with num_buckets: 2 needs 7 rows, .* 6 is less"):
        build_mapping(table, pa.array([1, 2, 3, 4]))


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (pa.date32(), [pa.date64(), *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns"))]),
        (pa.timestamp("s"), [pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("us"), pa.timestamp("ns", "UTC")]),
        (pa.time32("s"), [pa.time32("ms"), pa.time64("us"), pa.time64("ns")]),
    ],
    ids=str,
)
def test_a_time_is_one_id_in_whatever_unit(kind: pa.DataType, others: list[pa.DataType]) -> None:
    """Spark writes microseconds, pandas nanoseconds. An export, which has code of its own, says the same."""
    numbers = [0, 1, 86_399] if pa.types.is_time(kind) else [0, 1, 20_454, -7]
    times = pa.array(numbers, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    expected = read_keys(times).numbers
    assert expected.tolist() == [each * 10**9 * (86_400 if kind == pa.date32() else 1) for each in numbers]
    for other in others:
        assert np.array_equal(read_keys(times.cast(other)).numbers, expected), other
        assert np.array_equal(score.read_keys(score.stored(times.cast(other))).numbers, expected), other
