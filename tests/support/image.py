"""The stages of a Dockerfile, really run: every RUN and COPY, in a mount namespace, on overlays of this machine's root.

No container engine is needed, and nothing of the machine is changed. What stands in for the base image is this Python
with a fresh virtual environment in front of it. Root inside is root here; who is not root needs
subordinate ids, as the instructions make a user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from support.dockerfile import Dockerfile, Instruction, Stage, expanded

STAND_IN = "/opt/python-of-the-image"
HIDDEN = ("/tmp", "/run")
"""Of this machine; all stages see the same empty ones."""
KEPT_VARIABLES = ("PIP_", "SSL_", "REQUESTS_", "http", "HTTP", "no_proxy", "NO_PROXY", "UV_")
"""How this machine reaches what pip installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A stage after its last instruction."""

    root: Path
    """Where it is mounted, in the namespace."""
    layers: tuple[Path, ...]
    """What its instructions wrote, the newest first."""
    environment: Mapping[str, str]
    workdir: str = "/"
    user: str = "0:0"


class NotHere(Exception):
    """This machine does not let anybody build."""


class Builder:
    """`with` ends the namespace, and with it all mounts. `context` is the folder that COPY copies from."""

    def __init__(self, dockerfile: Dockerfile, context: Path, folder: Path, arguments: Mapping[str, str]) -> None:
        """`folder`: for mount points. Raises `NotHere` with what the machine refuses."""
        self._dockerfile, self._context, self._folder = dockerfile, context, folder
        self._arguments = {**dockerfile.arguments, **arguments}
        self._built: dict[str, Built] = {}
        check_sources(dockerfile, admitted(context))
        as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user", "--map-auto"]
        for program in ("unshare", "nsenter", "setpriv", "useradd"):
            if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
                raise NotHere(f"no {program} command on this machine")
        self._keeper = subprocess.Popen(
            ["unshare", *as_root, "--mount", "sh", "-c", "echo made && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"made\n":
            raise NotHere(f"no new mount namespace: {self._keeper.communicate()[1].decode().strip()}")
        enter = ["nsenter", "--target", str(self._keeper.pid), "--mount"]
        self.enter = [*enter, "--user", "--preserve-credentials"] if as_root else enter
        self._options = "userxattr," if as_root else ""

    def __enter__(self) -> Self:
        try:
            self._base = self._make_base()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.communicate()

    # --- stages -------------------------------------------------------------------------------------------------------

    def build(self, name: str) -> Built:
        """Raises AssertionError with what the instruction printed that fails."""
        if name not in self._built:
            stage = self._dockerfile.stages[name]
            below = self.build(stage.base) if stage.base in self._dockerfile.stages else self._base
            built = self._mounted(name, below)
            for instruction in stage.instructions:
                built = self._done(stage, instruction, built)
            self._built[name] = built
        return self._built[name]

    def command(self, built: Built, *argv: str, as_pid_1: bool = False) -> list[str]:
        """What runs `argv` in the image as its user, with as little as an engine may give: no privilege, a read-only
        root, no network, and no /dev/shm to write to.
        """
        uid, _, gid = built.user.partition(":")
        apart = ["unshare", "--mount", "--net", "--ipc", *(["--pid", "--fork", "--kill-child"] if as_pid_1 else [])]
        script = 'mount -o remount,bind,ro "$0" && mount -t tmpfs -o ro none "$0/dev/shm" && exec "$@"'
        read_only = ["sh", "-c", script, str(built.root)]
        drop = ["--reuid", uid, "--regid", gid, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        env = ["env", "-i", f"--chdir={built.workdir}", *(f"{key}={value}" for key, value in built.environment.items())]
        return [*self.enter, *apart, *read_only, "chroot", str(built.root), "setpriv", *drop, *env, *argv]

    def _done(self, stage: Stage, one: Instruction, built: Built) -> Built:
        """The image with one more instruction."""
        if one.name == "RUN":
            self._run(built, one.text)
        elif one.name == "COPY":
            self._copy(built, one)
        elif one.name == "ENV":
            new = {name: expanded(value, built.environment) for name, value in one.pairs.items()}
            return replace(built, environment={**built.environment, **new})
        elif one.name == "ARG":
            name, _, default = one.text.partition("=")
            return replace(built, environment={**built.environment, name: self._arguments.get(name, default)})
        elif one.name == "WORKDIR":
            self._sh(f"mkdir -p {built.root}{one.text}")
            return replace(built, workdir=one.text)
        elif one.name == "USER":
            return replace(built, user=one.text)
        return built

    def _run(self, built: Built, script: str) -> None:
        variables = {**pip_variables(), **built.environment, "HOME": "/", "LC_ALL": "C.UTF-8"}
        env = ["env", "-i", f"--chdir={built.workdir}", *(f"{key}={value}" for key, value in variables.items())]
        self._call([*self.enter, "chroot", str(built.root), *env, "sh", "-c", script])

    def _copy(self, built: Built, one: Instruction) -> None:
        *sources, destination = one.operands
        target = built.root / os.path.join(built.workdir, destination).lstrip("/")
        origin = one.flags.get("from")
        for source in sources:
            path = self._context / source if origin is None else self.build(origin).root / source.lstrip("/")
            if len(sources) > 1 or destination.endswith("/"):
                self._sh(f"mkdir -p {target} && cp {path} {target}/")
            else:  # the contents of a folder, or one file
                folder = f"mkdir -p {target} && cp -a {path}/. {target}"
                self._sh(f"if [ -d {path} ]; then {folder}; else cp {path} {target}; fi")
        if origin is None:
            self._sh(f"find {target} -name __pycache__ -prune -exec rm -r {{}} +")

    # --- the namespace ------------------------------------------------------------------------------------------------

    def _make_base(self) -> Built:
        self._sh(f"mkdir -p {self._folder} && mount -t tmpfs none {self._folder}")
        self._sh(f"mkdir -m 1777 {self._folder}/tmp && mkdir {self._folder}/run")
        base = self._mounted("base-image", Built(root=Path("/"), layers=(), environment={}))
        for folder in Path(sys.base_prefix).parents:  # in the overlay only: the image's user must get at its Python
            self._sh(f"chmod a+x {base.root}{folder}")
        python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        self._sh(f"chroot {base.root} {python} -m venv {STAND_IN}")
        return replace(base, environment={"PATH": f"{STAND_IN}/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})

    def _mounted(self, name: str, below: Built) -> Built:
        place = self._folder / name
        upper, work, root = place / "written", place / "work", place / "root"
        self._sh(f"mkdir -p {upper} {work} {root}")
        lower = ":".join(map(str, (*below.layers, "/")))
        options = f"{self._options}lowerdir={lower},upperdir={upper},workdir={work}"
        self._sh(f"mount -t overlay overlay -o {options} {root}")
        for mount in other_mounts(self._folder):  # an overlay shows what is below them
            self._sh(f"mkdir -p {root}{mount} && mount --bind {mount} {root}{mount}")
        for path in HIDDEN:
            self._sh(f"mount --bind {self._folder}{path} {root}{path}")
        self._sh(f"mount --rbind /proc {root}/proc && mount --rbind /dev {root}/dev")
        return replace(below, root=root, layers=(upper, *below.layers))

    def _sh(self, script: str) -> None:
        self._call([*self.enter, "sh", "-c", script])

    def _call(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"


def admitted(context: Path) -> set[str]:
    """What .dockerignore lets into the builder, which here names all of it."""
    return {line[1:] for line in (context / ".dockerignore").read_text().splitlines() if line.startswith("!")}


def check_sources(dockerfile: Dockerfile, seen: Set[str]) -> None:
    """Raises AssertionError for what is copied and the builder does not see."""
    for stage in dockerfile.stages.values():
        for copy in stage.all("COPY"):
            for source in copy.operands[:-1]:
                assert "from" in copy.flags or source in seen, f"COPY {source}: .dockerignore keeps it from the builder"


def other_mounts(folder: Path) -> list[str]:
    """Mount points that are none of the kernel's own."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    own = ("/proc", "/sys", "/dev", *HIDDEN, str(folder))
    return sorted({path for path in mounts if path != "/" and not path.startswith(own) and Path(path).is_dir()})


def pip_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(KEPT_VARIABLES)}
