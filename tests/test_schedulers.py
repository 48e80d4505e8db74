"""The examples for Kubernetes and TorchX: their fields, and the command lines that they start; Slurm's without one."""

import ast
import importlib.util
import os
import shlex
import string
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch import ROOT
from torch.distributed.run import get_args_parser

from recsys.config import Config, load_config

COMPONENT = ROOT / "scripts" / "torchx" / "component.py"

# Names of fields by their place; a container's and a volume's kinds are mappings of their own.
POD = {"subdomain", "restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes"}
CONTAINER = {"name", "image", "workingDir", "command", "args", "env", "resources", "volumeMounts"}
JOB = {"completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template"}
SERVICE = {"clusterIP", "publishNotReadyAddresses", "selector", "ports"}


def check_command(command: list[str]) -> tuple[Any, Config]:
    """Parse a command line as torchrun and train.py would; return torchrun's arguments and the config."""
    assert command[1:3] == ["-m", "torch.distributed.run"]
    launcher = get_args_parser().parse_args(command[3:])
    assert launcher.training_script == "train.py"
    path, *overrides = launcher.training_script_args
    config = load_config(ROOT / path, overrides)
    assert config.run.resume and config.run.dir
    return launcher, config


@pytest.fixture
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "scripts" / "kubernetes" / "train.yaml").read_text())
    found = {document["kind"]: document for document in documents}
    assert set(found) == {"Service", "Job"}
    return found


def test_kubernetes_fields(manifest: dict[str, Any]) -> None:
    service, job = manifest["Service"], manifest["Job"]
    assert service["apiVersion"] == "v1" and job["apiVersion"] == "batch/v1"
    assert set(service["spec"]) == SERVICE and set(job["spec"]) == JOB
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert set(pod) == POD and set(container) == CONTAINER
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never", "podFailurePolicy is for these only"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(each["value"], str) for each in container["env"]), "Kubernetes refuses numbers here"
    assert all(isinstance(each, str) for each in container["command"] + container["args"])
    grace = int(next(e["value"] for e in container["env"] if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    assert grace < pod["terminationGracePeriodSeconds"]


def test_kubernetes_pods_find_each_other(manifest: dict[str, Any]) -> None:
    service, job = manifest["Service"], manifest["Job"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    arguments = [each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in container["args"]]
    launcher, config = check_command(container["command"] + arguments)
    assert int(launcher.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert launcher.node_rank == 1, "that of the pod, by its index"
    assert launcher.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert launcher.master_port == service["spec"]["ports"][0]["port"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == container["resources"]["requests"]["nvidia.com/gpu"] == launcher.nproc_per_node
    paths = [config.run.dir, config.data.train, config.data.valid]
    assert all(str(path).startswith("/data/") for path in paths), "on the shared volume"


def test_torchx_component_is_one_by_its_syntax() -> None:
    """TorchX reads the source: every parameter has a type, and a line under Args of a docstring."""
    tree = ast.parse(COMPONENT.read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = function.args.args + function.args.kwonlyargs + [function.args.vararg]
    assert function.name == "train" and ast.unparse(function.returns or ast.Constant(0)) == "specs.AppDef"
    documented = (ast.get_docstring(function) or "").split("Args:")[1]
    for argument in names:
        assert argument is not None and ast.unparse(argument.annotation or ast.Constant(0)) in ("str", "int")
        assert f"{argument.arg}: " in documented


def load_component(specs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = types.ModuleType("torchx")
    package.specs = specs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchx", package)
    monkeypatch.setitem(sys.modules, "torchx.specs", specs)
    spec = importlib.util.spec_from_file_location("component", COMPONENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchx_command(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torchx.specs, so that it needs no TorchX; macros and the shell are filled in."""
    specs = types.ModuleType("torchx.specs")
    specs.macros = types.SimpleNamespace(app_id="${app_id}", rank0_env="${rank0_env}")  # type: ignore[attr-defined]
    for name in ("AppDef", "Role", "Resource"):
        setattr(specs, name, types.SimpleNamespace)
    module = load_component(specs, monkeypatch)
    app = module.train(
        "configs/dlrm_sample.yaml", "train.epochs=3", "data.train=/a b/$x", run_dir="runs/a", nodes=nodes, gpus=8
    )
    (role,) = app.roles
    option, line = role.args
    assert (role.entrypoint, option, role.num_replicas) == ("bash", "-c", nodes)
    line = string.Template(line).substitute(app_id="job", rank0_env="HOST")  # as TorchX does
    line = line.replace("${HOST:=localhost}", "host")  # as the shell does
    command = shlex.split(line.removeprefix("exec "))
    launcher, config = check_command(command)
    assert config.train.epochs == 3 and config.data.train == "/a b/$x"
    assert launcher.standalone is (nodes == 1)
    if nodes > 1:
        assert launcher.rdzv_endpoint == "host:29500" and launcher.rdzv_id == "job" and launcher.nnodes == "2"


def test_torchx_takes_it() -> None:
    specs = pytest.importorskip("torchx.specs", reason="TorchX is not installed")
    finder = pytest.importorskip("torchx.specs.finder", reason="TorchX is not installed")
    component = finder.get_component(f"{COMPONENT}:train")
    arguments = ["--run_dir", "runs/a", "--config", "configs/dlrm_sample.yaml"]
    app = specs.materialize_appdef(component.fn, [*arguments, "train.epochs=3"])
    assert "train.py configs/dlrm_sample.yaml run.dir=runs/a run.resume=true train.epochs=3" in app.roles[0].args[1]


@pytest.mark.parametrize("script", ["slurm/train.sbatch", "slurm/node.sh"])
def test_slurm_scripts_are_readable(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], check=True)


@pytest.mark.parametrize("begins", [False, True])
def test_a_slurm_job_that_did_not_come_to_train_is_not_tried_again(begins: bool, tmp_path: Path) -> None:
    """Though its run.dir is that of an earlier job. Srun and scontrol are stand-ins: the first fails at once."""
    plan, requeued = tmp_path / "runs" / "old" / "plan.json", tmp_path / "requeued"
    plan.parent.mkdir(parents=True)
    plan.touch()
    (plan.parent / ".recsys-run").touch()
    (tmp_path / "train.py").touch()
    write_plan = f"sleep 0.1; touch '{plan}'; " if begins else ""
    scontrol = f"case $1 in requeue) touch '{requeued}'; exit 1;; *) echo ' JobState=RUNNING ';; esac"
    for name, command in (("srun", f"{write_plan}exit 1"), ("scontrol", scontrol)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    of_job = {"ID": "7", "NAME": "recsys", "NODELIST": "n1", "NUM_NODES": "1"}
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    variables |= {f"SLURM_JOB_{name}": value for name, value in of_job.items()}
    script = ["bash", str(ROOT / "scripts/slurm/train.sbatch"), "config.yaml", f"run.dir={plan.parent}"]
    done = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and requeued.exists() == begins, done.stdout
    assert ("the run did not begin" in done.stdout) == (not begins)
    assert not list((tmp_path / "runs").glob(".*"))
