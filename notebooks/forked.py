"""Kernels of Jupyter as forks of one process that has torch, matplotlib and the engine loaded.

Importing them takes most of the time of a chapter that is tested in a hurry. After `register`, the
environment chooses: JUPYTER_DEFAULT_PROVISIONER_NAME=minillm-fork.
"""

import contextlib
import gc
import multiprocessing
import os
import threading
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

import chapters

NAME = "minillm-fork"
# Chapters that load models of random weights for their times alone: one layer will do.
ONLY_TIMED = ("03", "05", "08", "09", "12", "23")
PRELOAD = [  # what a chapter and this file import
    *("torch", "matplotlib.pyplot", "matplotlib_inline.backend_inline", "ipywidgets"),
    *("ipykernel.kernelapp", "jupyter_client.provisioning"),
    *("minillm.llm", "minillm_exercises.notebook"),
]


def register() -> None:
    """Make these kernels known to Jupyter in this process."""
    point = EntryPoint(NAME, f"{__name__}:ForkedProvisioner", KernelProvisionerFactory.GROUP_NAME)
    KernelProvisionerFactory.instance().provisioners[NAME] = point


@cache
def _context() -> Any:
    os.environ.update(chapters.calm_threads())  # read when the library of threads is loaded
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class ForkedProcess:
    """A kernel with what a provisioner asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], **settings: Any) -> None:
        self._process = _context().Process(target=_run_kernel, args=(arguments,), kwargs=settings)
        self._process.start()
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        status: int | None = self._process.exitcode
        return status

    def wait(self) -> int | None:
        """The exit status, once it has ended."""
        self._process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ForkedProvisioner(LocalProvisioner):
    """Starts a kernel by a fork; all else is as with a program."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Start it with the arguments that follow "python -m ipykernel_launcher"."""
        stderr = getattr(kwargs.get("stderr"), "name", os.devnull)
        settings = {"env": kwargs["env"], "cwd": str(kwargs["cwd"]), "stderr": stderr}
        self.process = ForkedProcess(cmd[cmd.index("-f") :], **settings)
        self.pid = self.pgid = self.process.pid
        self.cwd = kwargs["cwd"]
        return self.connection_info


def _run_kernel(arguments: list[str], env: dict[str, str], cwd: str, stderr: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setsid()  # a signal to the kernel's group reaches what it started, and no test
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
    import matplotlib
    import torch
    from ipykernel.kernelapp import launch_new_instance

    gc.freeze()  # what was imported stays: searching it for garbage takes 0.1 s each time
    gc.set_threshold(20_000)  # simulations make many objects, and few cycles
    matplotlib.use("module://matplotlib_inline.backend_inline")
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if env.get("MINILLM_QUICK") and env.get("MINILLM_CHAPTER") in ONLY_TIMED:
        from minillm.models import checkpoint

        whole = checkpoint.preset
        vars(checkpoint)["preset"] = lambda n: replace(whole(n), num_layers=1, vocab_size=2048)
    launch_new_instance([*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])  # no advice


def _end_with_parent() -> None:
    """The process that is forked waits for its forks, so they must not wait for it."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)
