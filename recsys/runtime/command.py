"""A command of this program in a process of its own, whose memory ends with it."""

import subprocess
import sys

from recsys.runtime.launch import environment_of_child


def run_command(*words: str, module: str = "recsys", shown: bool = True) -> str | None:
    """Run `recsys WORDS` on one process, whatever launcher this one has; return why it failed, or None.

    It ends with this one, if that comes first.

    Args:
        module: what is run in place of `recsys`.
        shown: what it prints goes to the standard output; its log and error are kept back in any case.
    """
    command = [sys.executable, "-m", module, *words]
    stdout = None if shown else subprocess.DEVNULL
    environment = environment_of_child()
    done = subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return None
    *_, last = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    return last.removeprefix("error: ")
