"""Killed at any moment, a prefix cache is found without a block that holds something else than is said of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import numpy as np

from kvpage.pages import allocator
from support import prefix_churn
from support.checkout import ROOT
from support.prefix_churn import GEOMETRY, GROUPS, MEMORY_BYTES, open_cache, prompt, row, work

PAGES = os.path.dirname(allocator.__file__)


def expect_only_true_content(memory: memoryview) -> int:
    """Take the memory over, as the next process does, and look at all that can be found. Returns how much that is."""
    cache, written = open_cache(memory)
    cache.check()  # what has content can be found, and nothing else
    found = 0
    for group in range(len(GROUPS)):
        for block in cache.pool.with_content(group).tolist():
            assert bytes(written[row(block)]) == cache.content_of(group, block)
            found += 1
    return found


def let_go_of_what_the_dead_held(memory: memoryview) -> None:
    cache, _ = open_cache(memory)
    for group in range(len(GROUPS)):
        times = cache.pool.times_held(group, range(GEOMETRY.num_blocks(group)))
        cache.pool.free(group, np.repeat(np.arange(len(times)), times))
    cache.check()


def test_processes_killed_one_after_another_leave_only_true_content() -> None:
    descriptor = os.memfd_create("prefix")
    try:
        os.ftruncate(descriptor, MEMORY_BYTES)
        with mmap.mmap(descriptor, MEMORY_BYTES) as shared:
            found = [killed_once(descriptor, shared, seed) for seed in range(12)]
    finally:
        os.close(descriptor)
    assert min(found[1:]) > 0


def killed_once(descriptor: int, shared: mmap.mmap, seed: int) -> int:
    command = [sys.executable, prefix_churn.__file__, str(seed), str(descriptor)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, pass_fds=[descriptor]) as process:
        assert process.stdout is not None
        process.stdout.read(1 + Random(seed).randrange(200))
        process.kill()
        process.stdout.read()
    with memoryview(shared) as memory:
        copy = memoryview(bytearray(memory))
        found = expect_only_true_content(copy)
        let_go_of_what_the_dead_held(copy)
        memory[:] = copy
    return found


class Moments:
    """Copies of the memory before every line of kvpage.pages that runs."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self.copies: list[bytes] = []

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PAGES):
            return None
        now = bytes(self._memory)
        if event == "line" and (not self.copies or self.copies[-1] != now):
            self.copies.append(now)
        return self._on_event

    def of(self, act: Callable[[], object]) -> list[bytes]:
        before = sys.gettrace()
        sys.settrace(self._on_event)
        try:
            act()
        finally:
            sys.settrace(before)
        return self.copies


def test_a_kill_between_any_two_lines_leaves_only_true_content() -> None:
    memory = bytearray(MEMORY_BYTES)
    parts, random = open_cache(memoryview(memory)), Random(1)
    for _ in range(10):  # until everything is full, so that each prompt evicts
        work(parts, prompt(random))
    evicted = parts.cache.counts.evicted
    copies: list[bytes] = []
    for _ in range(4):
        copies += Moments(memory).of(lambda: work(parts, prompt(random)))
    assert parts.cache.counts.evicted > evicted
    assert len(copies) > 100
    for copy in copies:
        taken_over = memoryview(bytearray(copy))
        expect_only_true_content(taken_over)
        let_go_of_what_the_dead_held(taken_over)
