"""How often decoding asks for Python's lock, by NumPy and compiled, which keeps threads from running in parallel.

A small library in C, loaded before the others, counts how often each mutex is locked; the most frequent one is that of
Python's lock, which is locked once to take that and once to release it. It needs a C compiler and Linux.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import throughput
from launcher import write

from recsys.data.inputs import open_inputs
from recsys.data.order import Position
from recsys.runtime import loops
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import open_world

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#define PLACES 4096
static _Atomic(void *) mutexes[PLACES];
static atomic_long counts[PLACES];
static int (*next)(pthread_mutex_t *);

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    if (!next) next = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    for (unsigned i = 0, place = (unsigned long)mutex >> 4; i < 16; i++, place++) {
        void *free = 0, *found = mutexes[place % PLACES];
        if (found == mutex || (!found && (atomic_compare_exchange_strong(&mutexes[place % PLACES], &free, (void *)mutex)
                                          || free == mutex))) {
            atomic_fetch_add(&counts[place % PLACES], 1);
            break;
        }
    }
    return next(mutex);
}

long most_locked(int reset) {
    long most = 0;
    for (int i = 0; i < PLACES; i++) {
        if (counts[i] > most) most = counts[i];
        if (reset) counts[i] = 0;
    }
    return most;
}
"""
WINDOWS = 4  # how many first windows, with new ids, are skipped, and how many are then counted


def count(shape: str, data: Path, library: str, compiled: bool) -> int:
    """Return how often decoding a window of 65,536 rows takes the lock, as the mean of a few windows."""
    arguments = argparse.Namespace(max_rows=100_000, dim=16, batch_size=65536)
    config = throughput.config_of(shape, data, arguments, ["data.num_threads=1", "run.num_threads=1"])
    counter = ctypes.PyDLL(library)  # PyDLL, because its calls do not release the lock
    if compiled:
        loops.compile_loops()
    with open_world(config.run.device, 1) as world:
        loader = open_inputs(config, world).loader("train")
        streams = loader._stream(Position(), 1 + 2 * WINDOWS, loader._shares[0])
        for placed in [next(streams) for _ in range(WINDOWS)]:
            loader._read(placed)
        windows = [next(streams) for _ in range(WINDOWS)]
        counter.most_locked(1)
        for placed in windows:
            loader._read(placed)
        return round(counter.most_locked(0) / 2 / WINDOWS)


def main() -> None:
    """Build the library, count in a new process for each shape and kind, and print JSON; --out writes it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=throughput.MODELS, default=list(throughput.MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count:
        shape, data, library, compiled = arguments.count
        print(count(shape, Path(data), library, compiled == "compiled"))
        return
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/locks.so"
        build = ["cc", "-x", "c", "-", "-O2", "-shared", "-fPIC", "-o", library, "-ldl"]
        subprocess.run(build, input=COUNTER, text=True, check=True)
        for shape in arguments.shapes:
            throughput.write_files(Path(folder, shape), shape, 8 * throughput.ROW_GROUP_ROWS, 100_000)  # one a stream
            counts[shape] = {}
            for how in ("by_numpy", "compiled"):
                command = [sys.executable, __file__, "--count", shape, f"{folder}/{shape}", library, how]
                variables = {**os.environ, "LD_PRELOAD": library}
                done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
                counts[shape][how] = int(done.stdout)
    result = write(arguments.out, {"per_65536_rows": counts, "versions": installed_versions()})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
