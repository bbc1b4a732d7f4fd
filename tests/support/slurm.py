"""A real two-node SLURM cluster on this host, with fake GPUs, its own folder and its own ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2")
GPUS_PER_NODE = 2
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "scontrol", "sinfo")
START_S = 30.0


def obstacle() -> str:
    """Return why no cluster can run on this machine, or "" if one can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root here"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{missing[0]} is not installed" if missing else ""


class Cluster:
    """Runs munged, slurmctld and one slurmd per node, as children of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = free_ports(1 + len(NODES))
        # munged requires its socket to be accessible to every user.
        self.folder.chmod(0o755)
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir()
        self._write("munge.key", os.urandom(1024))
        self.config.write_text(_slurm_conf(self.folder, host, *ports))
        gpus = [self._fake_gpu(index) for index in range(GPUS_PER_NODE)]
        lines = [f"NodeName={node} Name=gpu File={gpu}\n" for node in NODES for gpu in gpus]
        (self.folder / "gres.conf").write_text("".join(lines))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self._run("munged", "--foreground", *self._munge_files())
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._run("slurmctld", "-D", "-i")
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        self._wait(self._is_up, "both nodes to be idle")

    def stop(self) -> None:
        """Stop the jobs, then the daemons, the last one started first."""
        # Without this, a job step would wait forever for the controller, which is stopped next.
        with contextlib.suppress(TimeoutError):
            self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.config)}

    def command(self, *argv: str) -> str:
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until both nodes are idle."""
        if self.command("squeue", "--noheader"):
            self.command("scancel", "--signal=KILL", "--full", "--user=root")
            self.command("scancel", "--user=root")
        self._wait(self._is_up, "the nodes to be idle again")

    def _is_up(self) -> bool:
        return self.command("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split() == [
            "idle"
        ] * len(NODES)

    def _run(self, *argv: str) -> None:
        with (self.folder / "log" / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(argv, env=self.environment, stdout=log, stderr=log))

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline:
                log_tail = (self.folder / "log" / "daemons.log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"waited {START_S:g} s for {what}:\n{log_tail}")
            time.sleep(0.1)

    def _write(self, name: str, content: bytes) -> None:
        (self.folder / name).touch(mode=0o600)
        (self.folder / name).write_bytes(content)

    def _fake_gpu(self, index: int) -> Path:
        """Create a null device in place of a GPU, because SLURM requires the device file to exist."""
        path = self.folder / f"nvidia{index}"
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        return path

    def _munge_files(self) -> list[str]:
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
        names |= {"log-file": "log/munge.log", "seed-file": "munge.seed"}
        return [f"--{flag}={self.folder / name}" for flag, name in names.items()]


def free_ports(count: int) -> list[int]:
    """Return free ports. All sockets stay open until the last port is found, so that the ports differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _slurm_conf(folder: Path, host: str, controller: int, *ports: int) -> str:
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
        f" Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    ]
    return "\n".join(
        [
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}",
            "SlurmUser=root\nSlurmdUser=root",
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nCredType=cred/munge",
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log\nSlurmdLogFile={folder}/log/slurmd.%n.log",
            "SwitchType=switch/none\nMpiDefault=none\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none",
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nGresTypes=gpu\nReturnToService=2",
            "JobCompType=jobcomp/none\nAccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none\nSlurmctldParameters=enable_configless\nKillWait=10",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1\nCompleteWait=0",
            *nodes,
            "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL",
            # Jobs in the partition `urgent` preempt jobs in `main`, which get SIGTERM and end after at most 8 s.
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES State=UP PriorityTier=1 GraceTime=8",
            f"PartitionName=urgent Nodes={','.join(NODES)} State=UP PriorityTier=2\n",
        ]
    )
