"""Causal attention on jagged lists, which are padded in buckets of about equal length."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from recsys.models.columns import take_rows

_MOST_PADDING = 1.25  # places of a bucket for each id in it

# Takes queries, keys and values, and returns a result, each [lists, heads, length, width]; no id attends to later ones.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def softmax_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return causal attention: means of values, weighted by the softmax of scaled products of queries and keys."""
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


@dataclass(frozen=True)
class Lists:
    """Places of the ids of a batch's lists, and the buckets in which the lists are padded.

    Lists are sorted by length, and a new bucket begins when padding to the longest list would need more than 1.25
    places an id. On a GPU a kernel for lists of any length (torch.nn.attention.varlen) would need no buckets.

    Attributes:
        row: list of each id, [ids] int64. from_end: number of later ids in its list, [ids] int64.
        places: place of each id in the padded buckets, [ids] int64.
        buckets: number of lists and padded length of each bucket.
    """

    row: torch.Tensor
    from_end: torch.Tensor
    places: torch.Tensor
    buckets: list[tuple[int, int]]

    @staticmethod
    def of(lengths: np.ndarray, device: torch.device) -> "Lists":
        """Return the places of the ids of lists with some lengths, [lists] int64, on a device."""
        row = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        longest_first = np.argsort(-lengths, kind="stable")
        buckets, starts = _buckets(lengths[longest_first]), np.zeros_like(lengths)
        first = start = 0
        for number, length in buckets:
            starts[longest_first[first : first + number]] = start + length * np.arange(number)
            first, start = first + number, start + number * length
        arrays = row, lengths[row] - 1 - place, starts[row] + place
        row_of_id, from_end, places = (to_device(array, device) for array in arrays)
        return Lists(row_of_id, from_end, places, buckets)

    def attend(self, qkv: torch.Tensor, num_heads: int, attention: Attention = softmax_attention) -> torch.Tensor:
        """Return the output of attention for each id, [ids, width].

        Args:
            qkv: queries, keys and values side by side, [ids, 3 * width].
        """
        sizes = [number * length for number, length in self.buckets]
        padded = qkv.new_zeros(sum(sizes), qkv.shape[1]).index_copy(0, self.places, qkv)
        width, results = qkv.shape[1] // 3, [qkv[:0, : qkv.shape[1] // 3]]
        for bucket, shape in zip(padded.split(sizes), self.buckets, strict=True):
            # [3, lists, heads, length, width of a head]
            parts = bucket.view(*shape, 3, num_heads, width // num_heads).permute(2, 0, 3, 1, 4)
            results.append(attention(*parts.unbind()).transpose(1, 2).reshape(-1, width))
        return take_rows(torch.cat(results), self.places)


class PaddedLists:
    """`Lists` with every list padded to one length, since `torch.export` has no shapes that depend on the data.

    Attributes: see `Lists`.
    """

    def __init__(self, lengths: torch.Tensor, num_ids: int, longest: int) -> None:
        self._num_lists, self._longest = lengths.shape[0], longest
        self.row = torch.repeat_interleave(lengths, output_size=num_ids)
        place = torch.arange(num_ids) - (lengths.cumsum(0) - lengths)[self.row]
        self.from_end = lengths[self.row] - 1 - place
        self._places = self.row * longest + place

    def attend(self, qkv: torch.Tensor, num_heads: int, attention: Attention = softmax_attention) -> torch.Tensor:
        """Return the output of attention for each id, [ids, width]; see `Lists.attend`."""
        width = qkv.shape[1] // 3
        padded = qkv.new_zeros(self._num_lists * self._longest, 3 * width).index_copy(0, self._places, qkv)
        shape = self._num_lists, self._longest, 3, num_heads, width // num_heads
        attended = attention(*padded.view(*shape).permute(2, 0, 3, 1, 4).unbind())
        return attended.transpose(1, 2).reshape(-1, width)[self._places]


def host_lengths(lengths: torch.Tensor, num_ids: int) -> np.ndarray:
    """Return the lengths of lists on the host, [lists] int64; for a fake tensor, which has no values, lengths from 0 to
    twice the mean, so that there are realistic buckets."""
    if isinstance(lengths, FakeTensor):
        ends = np.linspace(0, 1, len(lengths) + 1) ** 2 * num_ids
        return np.diff(ends.round().astype(np.int64))
    return lengths.cpu().numpy().astype(np.int64)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; from page-locked memory, so that the host does not wait for a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _buckets(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return the number of lists and the greatest length of each bucket; `lengths` descend, empty lists are in none."""
    lengths = lengths[lengths > 0]
    ends, buckets, start = np.concatenate([[0], np.cumsum(lengths)]), [], 0
    while start < len(lengths):
        ids = ends[start + 1 :] - ends[start]
        padded = int(lengths[start]) * np.arange(1, len(ids) + 1)
        # The share of padding grows with each further list, since lengths descend.
        number = int(np.count_nonzero(padded <= _MOST_PADDING * ids))
        buckets.append((number, int(lengths[start])))
        start += number
    return buckets
