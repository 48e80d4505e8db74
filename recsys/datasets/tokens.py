"""Texts as lists of ids: the parts between separators, or the words."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.made import lists_in
from recsys.errors import UserError

TOKENS_HELP = "text columns to split into lists of words: lower case, without English stop words"
_ENGLISH = """a an and are as at be but by for from has have he her his i if in into is it its me my no not of on or our
s she so t than that the their them they this to us was we were will with you your"""


def tokenize(column: pa.Array | pa.ChunkedArray, name: str) -> pa.ListArray:
    """Return the words of texts, list<string>: runs of letters and digits of any script; a null gives an empty list.

    Languages that are written without spaces are not cut into words.

    Raises:
        UserError: the column does not hold texts.
    """
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)):
        raise UserError(f"--tokens: column {name!r} is {column.type}, and no text")
    texts = pc.utf8_lower(pc.fill_null(column.cast(pa.string()), ""))
    texts = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    lists = pc.split_pattern_regex(texts, r"[^\p{L}\p{M}\p{N}]+")
    words = lists.flatten()
    kept = pc.invert(pc.is_in(words, pa.array(["", *_ENGLISH.split()])))
    before = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
    offsets = before[np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())])]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), words.filter(kept))


def split_list(column: pa.Array, separator: str, dtype: pa.DataType) -> pa.ListArray:
    """Strings to lists of ``dtype`` as `lists_in` makes them, except that null gives an empty list.

    Raises ArrowInvalid for a token that is not of ``dtype``.
    """
    return lists_in(pc.fill_null(column, ""), separator).cast(pa.list_(dtype))
