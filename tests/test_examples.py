"""The examples for clusters: they parse, their settings exist, and the SLURM script handles signals as documented."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megabatch import config

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
SCRIPT = CLUSTER / "train.sbatch"

# Fakes of SLURM's commands. The step records its arguments, and takes a moment to end on SIGTERM.
STAND_INS = {
    "srun": 'exec "$@"',
    "torchrun": """printf '%s\\n' "$@" > arguments
echo $$ > pid
trap 'sleep 0.3; touch saved; exit 1' TERM
[[ -n ${LASTS:-} ]] || exit "${STATUS:-0}"
while :; do sleep 0.05; done""",
    "scancel": 'echo "scancel $*" >> calls; kill -TERM "$(cat pid)"',
    "scontrol": 'if [[ $1 == show ]]; then printf "node%d\\n" {7..999}; else echo "scontrol $*" >> calls; fi',
}


class Job:
    """The running SLURM script, with faked commands."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        for name, text in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        self.folder = folder
        slurm = {"JOB_NODELIST": "node[7-8]", "JOB_ID": "4711", "CPUS_PER_TASK": "4", "JOB_NUM_NODES": "2", "RESTART_COUNT": "1"}
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", **{f"SLURM_{k}": v for k, v in slurm.items()}, **variables}
        self.process = subprocess.Popen(["bash", SCRIPT, *arguments], cwd=folder, env=environment)

    def signal(self, number: int) -> None:
        while not self.read("pid"):
            assert self.process.poll() is None, "ended before its step began"
            time.sleep(0.01)
        self.process.send_signal(number)

    def status(self) -> int:
        return self.process.wait(timeout=20)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text() if (self.folder / name).exists() else ""


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text()))


def settings(command: list[str]) -> list[str]:
    """Return what follows the file in a `torchrun … -m megabatch train run.toml` command line."""
    at = command.index("-m")
    assert command[at + 1 : at + 3] == ["megabatch", "train"]
    assert Path(command[at + 3]).name == "run.toml"
    return command[at + 4 :]


def test_shell_syntax():
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_slurm_settings_are_known(tmp_path):
    job = Job(tmp_path, "batch.size=65536", RUN="/shared/a run")
    assert job.status() == 0
    command = job.read("arguments").splitlines()
    assert {"--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node7:24711", "--rdzv-id=4711-1"} <= set(command)
    run = config.read(CLUSTER / "run.toml", settings(command))
    assert (run.out, run.batch.size, run.compute.sharding) == ("/shared/a run", 65536, "fsdp2")
    assert job.read("calls") == ""


def test_slurm_saves_and_requeues_when_the_time_is_up(tmp_path):
    job = Job(tmp_path, LASTS="yes")
    job.signal(signal.SIGUSR1)
    assert job.status() == 0
    assert (tmp_path / "saved").exists()
    assert job.read("calls").splitlines() == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]


def test_slurm_waits_for_the_checkpoint_of_a_job_that_is_preempted_or_cancelled(tmp_path):
    job = Job(tmp_path, LASTS="yes")
    job.signal(signal.SIGTERM)
    time.sleep(0.1)
    assert job.process.poll() is None
    os.kill(int(job.read("pid")), signal.SIGTERM)
    assert job.status() == 1
    assert (tmp_path / "saved").exists()
    assert job.read("calls") == ""


def test_slurm_does_not_requeue_a_run_that_fails(tmp_path):
    job = Job(tmp_path, STATUS="3")
    assert job.status() == 3
    assert job.read("calls") == ""


def test_slurm_returns_the_status_of_a_step_that_ends_at_once(tmp_path):
    # The step has ended before the script looks for it.
    (tmp_path / "late").write_text('kill() { sleep 0.3; builtin kill "$@"; }')
    assert Job(tmp_path, STATUS="3", BASH_ENV=str(tmp_path / "late")).status() == 3


def test_kubernetes_settings_are_known():
    [job] = [d for d in documents() if d["kind"] == "TrainJob"]
    command = job["spec"]["trainer"]["command"]
    assert command[0] == "torchrun"
    run = config.read(CLUSTER / "run.toml", settings(command))
    assert run.out == "/runs/clip"


def test_kubernetes_objects_fit_together():
    claim, runtime, job = documents()
    assert [d["apiVersion"] for d in (runtime, job)] == ["trainer.kubeflow.org/v1alpha1"] * 2
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert replicated["name"] == container["name"] == "node"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert any(part == f"{mounts['configuration']}/run.toml" for part in trainer["command"])
    assert any(part.startswith(f"out={mounts['runs']}/") for part in trainer["command"])
    # Kubernetes must send SIGKILL after torchrun does.
    [timeout] = [int(v["value"]) for v in trainer["env"] if v["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert timeout < pod["terminationGracePeriodSeconds"]


def test_readme_names_every_file():
    text = (CLUSTER / "README.md").read_text()
    for file in CLUSTER.iterdir():
        assert file.name == "README.md" or f"{file.name}" in text


@pytest.mark.parametrize("wrong", ["out", "data.sauce=x"])
def test_a_wrong_setting_fails_the_check(wrong):
    with pytest.raises(ValueError):
        config.read(CLUSTER / "run.toml", [wrong])
