"""scripts/slurm/train.sbatch on a real Slurm of two nodes: every end but the last goes on where it stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import ROOT, environment

pytestmark = pytest.mark.slurm

ROWS, STEPS = 3000, 12  # of an epoch of data/sample
PORT = 17817
ENDLESS = 10_000  # epochs
RESUME = "scontrol update nodename=n2 state=resume 2>/dev/null; sinfo --noheader --nodes=n2 --format=%T"
SAVE_OFTEN = ("train.checkpoint_every_steps=3",)


class Cluster:
    """Submits jobs in `folder`, which looks like the repository's root, and watches them."""

    def __init__(self, folder: Path, conf: Path) -> None:
        self.folder = folder
        self._environment = {**environment(), "SLURM_CONF": str(conf)}
        self._environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for name in ("train.py", "recsys", "data", "scripts"):
            (folder / name).symlink_to(ROOT / name)

    def call(self, *command: str, **variables: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment | variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def set_epochs(self, epochs: int) -> None:
        """Write the config of all jobs; a job reads it when it starts, and again when it is requeued."""
        text = (ROOT / "configs" / "dlrm_sample.yaml").read_text()
        text = re.sub(r"epochs: \d+", f"epochs: {epochs}", text)
        (self.folder / "config.yaml").write_text(re.sub(r"log_every_steps: \d+", "log_every_steps: 1", text))

    def submit(self, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> str:
        script = ("scripts/slurm/train.sbatch", "config.yaml", *arguments)
        return self.call("sbatch", "--parsable", "--nodes=2", *options, *script, **variables).strip()

    def show(self, job: str, field: str) -> str:
        found = re.search(rf" {field}=(\S+)", self.call("scontrol", "show", "job", "-o", job))
        assert found
        return found[1]

    def wait(self, job: str, condition: Callable[[], object], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.call("scontrol", "show", "job", job), self.output(job)[-4000:])
            time.sleep(0.2)

    def wait_for_step(self, job: str, least: int) -> None:
        self.wait(job, lambda: self.step(job) >= least)

    def wait_for_state(self, job: str, *states: str) -> None:
        self.wait(job, lambda: self.show(job, "JobState") in states)

    def step(self, job: str) -> int:
        try:
            return int(json.loads((self.run_dir(job) / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        except (OSError, ValueError, IndexError):
            return 0

    def run_dir(self, job: str) -> Path:
        return self.folder / "runs" / f"recsys-{job}"

    def output(self, job: str) -> str:
        path = self.folder / f"slurm-recsys-{job}.out"
        return path.read_text() if path.exists() else ""

    def saved_step(self, job: str) -> int:
        return int((self.run_dir(job) / "checkpoints" / "latest").read_text().removeprefix("step-"))

    def finish_after_requeue(self, job: str) -> None:
        """See that the job was requeued, resumes where it saved, and ends with every row trained once an epoch."""
        self.wait(job, lambda: self.show(job, "Restarts") == "1" and self.show(job, "JobState") == "PENDING")
        saved = self.saved_step(job)
        epochs = saved // STEPS + 2
        self.set_epochs(epochs)
        self.call("scontrol", "update", f"jobid={job}", "StartTime=now")
        self.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
        told = self.output(job)[-6000:]
        assert self.show(job, "JobState") == "COMPLETED" and self.show(job, "ExitCode") == "0:0", told
        assert f"resumed at step {saved} " in self.output(job)
        result = self.result(job)
        assert result["status"] == "done" and result["world_size"] == 2
        assert [epoch["seen"] for epoch in result["data"]["epochs"]] == [ROWS] * epochs
        assert not list((self.folder / "runs").glob(".stop-*"))

    def result(self, job: str) -> dict:
        return json.loads((self.run_dir(job) / "result.json").read_text())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own is for root only")
    if not all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "munged", "unshare")):
        pytest.skip("Slurm is not installed (Debian: slurm-wlm and munge)")
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # a short path, for unix sockets
    folder.chmod(0o755)
    script = ["bash", str(ROOT / "tests" / "helpers" / "slurm_cluster.sh")]
    up = subprocess.run([*script, "up", str(folder / "c"), str(PORT)], capture_output=True, text=True, timeout=120)
    try:
        if up.returncode != 0:
            pytest.skip(f"Slurm does not start here: {up.stderr[-1000:]}")
        (folder / "work").mkdir()
        yield Cluster(folder / "work", folder / "c" / "slurm.conf")
    finally:
        subprocess.run([*script, "down", str(folder / "c")], capture_output=True, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def test_two_nodes_train(cluster: Cluster) -> None:
    cluster.set_epochs(1)
    (cluster.folder / "sweep.txt").write_text("seed=7\nseed=8 train.global_batch_size=500\n")
    job = cluster.submit(options=("--array=2",), SWEEP="sweep.txt", LAUNCHER="env OMP_NUM_THREADS=1")
    run_dir = cluster.run_dir(f"{job}_2")
    cluster.wait(job, lambda: cluster.show(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.show(job, "JobState") == "COMPLETED" and cluster.show(job, "ExitCode") == "0:0"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["world_size"] == 2 and result["rows_seen"] == ROWS and result["steps"] == 6
    assert "seed: 8" in (run_dir / "config.yaml").read_text()
    assert {path.name for path in (run_dir / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert "[rank 0] step" in (cluster.folder / f"slurm-recsys-{job}.out").read_text()


def test_a_mistake_fails_at_once(cluster: Cluster) -> None:
    cluster.set_epochs(1)
    job = cluster.submit("train.epoch=3")
    cluster.wait_for_state(job, "FAILED", "COMPLETED")
    assert cluster.show(job, "JobState") == "FAILED" and cluster.show(job, "Restarts") == "0"
    assert "did you mean 'train.epochs'?" in cluster.output(job)


def test_the_time_limit(cluster: Cluster) -> None:
    cluster.set_epochs(ENDLESS)
    job = cluster.submit()
    cluster.wait_for_step(job, 5)
    cluster.call("scontrol", "update", f"jobid={job}", "TimeLimit=3")  # less than 180 s are left now: USR2 comes
    cluster.wait_for_state(job, "PENDING", "FAILED", "COMPLETED", "TIMEOUT")
    cluster.call("scontrol", "update", f"jobid={job}", "TimeLimit=UNLIMITED")
    assert cluster.result(job)["status"] == "stopped" and cluster.saved_step(job) == cluster.step(job)
    cluster.finish_after_requeue(job)


def test_preemption(cluster: Cluster) -> None:
    cluster.set_epochs(ENDLESS)
    job = cluster.submit(options=("--exclusive",))
    cluster.wait_for_step(job, 5)
    other = cluster.call(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=srun true"
    ).strip()
    cluster.finish_after_requeue(job)
    assert cluster.show(other, "JobState") == "COMPLETED"
    assert "stop requested: saving step" in cluster.output(job)


def test_a_node_goes_down(cluster: Cluster) -> None:
    cluster.set_epochs(ENDLESS)
    job = cluster.submit(*SAVE_OFTEN)
    cluster.wait_for_step(job, 5)
    cluster.call("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    try:
        cluster.wait_for_state(job, "PENDING", "FAILED", "NODE_FAIL")
        assert cluster.show(job, "JobState") == "PENDING"
    finally:  # refused while the node is busy with the end of the job
        cluster.wait(job, lambda: "idle" in cluster.call("bash", "-c", RESUME))
    cluster.finish_after_requeue(job)


def test_a_rank_is_killed(cluster: Cluster) -> None:
    cluster.set_epochs(ENDLESS)
    job = cluster.submit(*SAVE_OFTEN)
    cluster.wait_for_step(job, 5)
    os.kill(rank_process(cluster.run_dir(job).name, rank=1), signal.SIGKILL)
    cluster.finish_after_requeue(job)
    assert "SIGKILL" in cluster.output(job) and "failure 1 of 3" in cluster.output(job)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster) -> None:
    cluster.set_epochs(ENDLESS)
    job = cluster.submit()
    cluster.wait_for_step(job, 5)
    cluster.call("scancel", job)
    cluster.wait_for_state(job, "CANCELLED", "PENDING", "FAILED")
    assert cluster.show(job, "JobState") == "CANCELLED" and cluster.show(job, "Restarts") == "0"
    assert cluster.saved_step(job) == cluster.step(job)


def test_a_job_that_stops_early_does_not_succeed(cluster: Cluster) -> None:
    cluster.set_epochs(ENDLESS)
    job = cluster.submit(options=("--no-requeue",))
    cluster.wait_for_step(job, 5)
    cluster.call("scancel", "--batch", "--signal=USR2", job)
    cluster.wait_for_state(job, "FAILED", "COMPLETED", "PENDING")
    assert cluster.show(job, "JobState") == "FAILED" and cluster.show(job, "ExitCode") == "1:0"
    assert cluster.result(job)["status"] == "stopped"


def rank_process(name: str, rank: int) -> int:
    """Return the process of a rank: one that runs train.py for this run directory, and not its launcher."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if f"run.dir=runs/{name}\0" in command and "torch.distributed" not in command and "srun" not in command:
                variables = (entry / "environ").read_text().split("\0")
                if f"RANK={rank}" in variables:
                    return int(entry.name)
        except OSError:
            continue
    raise AssertionError("no such process")
