"""States of the random number generators as tensors.

What trains draws from counters (`runtime.counter_random`); the generators are kept for whatever else draws. Of NumPy's
and Python's, the second number of a pair from the normal distribution is not kept.
"""

import random

import numpy as np
import torch


def rng_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators (host, and `device` if it is a GPU), of NumPy's and of Python's.

    Returns:
        uint8 of torch's; int64 [625] of NumPy's and Python's: the words of the Mersenne Twister and its position.
    """
    numpy_state = np.random.get_state(legacy=False)["state"]
    _, state, _ = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*numpy_state["key"].tolist(), numpy_state["pos"]]),
        "python": torch.tensor(state),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the generators from what `rng_tensors` returned."""
    torch.set_rng_state(tensors["torch"])
    *words, position = tensors["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(words, np.uint32), position, 0, 0.0))
    random.setstate((3, tuple(tensors["python"].tolist()), None))
    if "cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], device)
