"""What all tests share: Python's collector of cycles is off while they are imported and gathered.

All of that stays, and looking through it again and again took a third of the time. It is left out later too.
"""

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
