"""A command of this program in a process of its own, whose memory ends with it."""

import subprocess
import sys

from recsys.errors import UserError, told_error
from recsys.runtime.launch import environment_of_child


def run_command(*words: str, module: str = "recsys", shown: bool = True) -> UserError | None:
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
    return told_error(done.stderr, done.returncode) if done.returncode else None
