"""How a command starts its processes: torchrun, srun, accelerate, deepspeed, or plain python."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..formats.command_text import Command


class StartedProcesses(NamedTuple):
    """ranks: processes that are started. visible: GPUs that one plain process sees. None if the text does not tell."""

    ranks: int | None
    visible: int | None = None


def launch_of(command: Command) -> StartedProcesses:
    """Return how a command is launched; `#SBATCH` lines of its script count for srun."""
    head, text = command.head, command.text
    if re.search(r"torchrun|torch\.distributed\.(run|launch)", head):
        return StartedProcesses(_product(head, r"--nproc[_-]per[_-]node", r"--nnodes", default=1))
    if re.search(r"\bsrun\b", head):
        return StartedProcesses(_product(text, r"--(?:ntasks|gpus|tasks)-per-node", r"--nodes", default=None))
    if re.search(r"\baccelerate\s+launch\b", head):
        return StartedProcesses(_number(head, r"--num[_-]processes"))
    if re.search(r"\bdeepspeed\b", head):
        each, nodes = _number(head, r"--num_gpus"), _number(head, r"--num_nodes")
        included = re.search(r"--include[= ]+[\"']?localhost:(\d+(?:,\d+)*)", head)
        if included and each is None:
            return StartedProcesses(len(included[1].split(",")))
        return StartedProcesses(None if each is None else each * (nodes or 1))
    if re.search(r"\bpython", head) and not re.search(r"mpirun|horovodrun|\$", head):
        visible = re.search(r"\bCUDA_VISIBLE_DEVICES=[\"']?(\d+(?:,\d+)*)", head + _exported(text[: command.start]))
        return StartedProcesses(1, len(visible[1].split(",")) if visible else None)
    return StartedProcesses(None)


def _exported(text: str) -> str:
    return " ".join(re.findall(r"^\s*export\s+(CUDA_VISIBLE_DEVICES=\S+)", text, re.MULTILINE)[-1:])


def _number(text: str, flag: str) -> int | None:
    match = re.search(flag + r"[= ]+[\"']?(\d{1,9})\b", text)
    return int(match[1]) if match and int(match[1]) > 0 else None


def _product(text: str, each: str, nodes: str, default: int | None) -> int | None:
    numbers = []
    for pattern in (each, nodes):
        match = re.search(pattern + r"[= ]+([^\s\"']+)", text)
        number = int(match[1]) if match and re.fullmatch(r"[1-9]\d{0,8}", match[1]) else None if match else default
        if number is None:
            return None
        numbers.append(number)
    return numbers[0] * numbers[1]
