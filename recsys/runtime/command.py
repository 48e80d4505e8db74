"""Commands of this program in a process of their own, whose memory is freed with it."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

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


def run_attended(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its status; Ctrl-C is passed on to it, and raised here once the command has ended.

    `subprocess.run` kills what has not ended within a quarter of a second, before a checkpoint is written. The command
    has a session of its own, since a terminal's Ctrl-C would else come twice, which torchrun takes for haste.
    """
    interrupt: KeyboardInterrupt | None = None
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt as error:
                interrupt = error
                process.send_signal(signal.SIGINT)
            except BaseException:  # what a handler of another signal raises
                process.terminate()
                raise
    if interrupt is not None:
        raise interrupt
    return process.returncode
