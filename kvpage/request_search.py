"""What a plan request says to a search for a layout: the workload to judge by, and bounds."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StrictFloat, StrictInt, field_validator, model_validator

from kvpage.errors import SpecInvalid
from kvpage.request_backends import RequestModel, Size

MAX_WORKLOAD_PARTS = 64
MAX_WORKLOAD_TOKENS = 2**31  # of a request
MAX_GROUPS = 256  # an engine keeps a block table of each, for every request
MAX_BLOCK_TOKENS = 2**16

Tokens = Annotated[StrictInt, Field(ge=1, le=MAX_WORKLOAD_TOKENS)]


class WorkloadEntry(RequestModel):
    """Requests of `tokens` tokens, or of `min_tokens` to `max_tokens`, each length as likely."""

    tokens: Tokens | None = None
    min_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    weight: Annotated[StrictFloat, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0
    """Share among all entries."""

    @model_validator(mode="after")
    def _length_is_given_once(self) -> Self:
        given = (self.tokens is not None, self.min_tokens is not None, self.max_tokens is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise SpecInvalid("give tokens, or min_tokens and max_tokens")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SpecInvalid(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self

    @property
    def shortest_tokens(self) -> int:
        return self.tokens or self.min_tokens or 1

    @property
    def longest_tokens(self) -> int:
        return self.tokens or self.max_tokens or 1


class SearchFields(RequestModel):
    """Fields of a plan request that strategy `unify`, which searches nothing, does not look at."""

    workload: Annotated[tuple[WorkloadEntry, ...], Field(max_length=MAX_WORKLOAD_PARTS, fail_fast=True)] | None = None
    """Left out: short, middle and long requests as often (`kvpage.planner.workload`)."""
    max_groups: Annotated[StrictInt, Field(ge=1, le=MAX_GROUPS)] | None = None
    """Block tables at most. Left out: 16, or one for each life cycle where there are more."""
    max_block_size: Annotated[StrictInt, Field(ge=1, le=MAX_BLOCK_TOKENS)] | None = None
    """Tokens of a block at most. Left out: 1,024, or what hybrid alignment would take where that is more."""
    max_block_lcm: Size | None = None
    """Least common multiple of all block sizes at most, in tokens. Left out: 1,024, or as above."""
    max_block_stride_bytes: Size | None = None
    """Bytes from one block to the next at most."""
    max_one_token_bytes: Size | None = None
    """Bytes that a request of one token may hold: a slab of every group."""

    @field_validator("workload")
    @classmethod
    def _has_requests(cls, workload: tuple[WorkloadEntry, ...] | None) -> tuple[WorkloadEntry, ...] | None:
        if workload is not None and not workload:
            raise SpecInvalid("the workload has no requests; leave it out for the usual mix")
        return workload
