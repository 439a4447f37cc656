"""The double's own memory handling and locking, under the compiler's sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.fakecuda import COMPILE, SOURCES, FakeDevices, compiler, sources

GRAIN = 65536
SMOKE = SOURCES / "smoke" / "smoke.c"
# An ordinary program that makes the mistake the sanitizer is for: where it does not fire, a clean run says nothing.
FAULTY = {
    "address,undefined": "#include <stdlib.h>\nint main(void) { char *p = malloc(1); free(p); return p[0]; }\n",
    "thread": (
        "#include <pthread.h>\nstatic int n;\n"
        "static void *add(void *p) { for (int i = 0; i < 100000; i++) n++; return p; }\n"
        "int main(void) { pthread_t t; pthread_create(&t, 0, add, 0); add(0); pthread_join(t, 0); return 0; }\n"
    ),
}


def build(sanitizer: str, target: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [compiler(), *COMPILE, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-o", str(target)]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True)


@pytest.mark.parametrize("sanitizer", FAULTY)
def test_nothing_is_found(sanitizer: str, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.c"
    faulty.write_text(FAULTY[sanitizer])
    if (done := build(sanitizer, tmp_path / "faulty", faulty)).returncode != 0:
        pytest.skip(f"this compiler has no -fsanitize={sanitizer}: {done.stderr.splitlines()[-1]}")
    assert subprocess.run([tmp_path / "faulty"], capture_output=True).returncode != 0
    done = build(sanitizer, tmp_path / "smoke", SMOKE, *(path for path in sources() if path.suffix == ".c"))
    assert (done.returncode, done.stderr) == (0, "")
    with FakeDevices(granularity_bytes=GRAIN) as devices:
        environment = {**os.environ, **devices.env(log=True)}
        done = subprocess.run([tmp_path / "smoke"], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
        assert devices.used_bytes(devices.uuids[0]) == 0
