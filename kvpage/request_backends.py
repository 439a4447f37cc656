"""Backends as a plan request writes them: a registered name, or the layout written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, StrictStr, Tag, model_validator

from kvpage.backends import AttentionLayout, KernelBlockSizes, parse_extent
from kvpage.errors import SpecInvalid
from kvpage.specs import MAX_BYTES

MAX_RANK = 8  # axes of a written-out layout or a state tensor
MAX_AXIS_CHARS = 256
MAX_KERNEL_BLOCK = 65_536  # tokens that kernels may be limited to

Size = Annotated[StrictInt, Field(ge=1, le=MAX_BYTES)]
Count = Annotated[StrictInt, Field(ge=0, le=MAX_BYTES)]


def _json_type(value: object) -> str:
    if isinstance(value, Mapping | BaseModel):
        return "object"
    return "string" if isinstance(value, str) else "number"


class RequestModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        revalidate_instances="always",  # model_construct and model_copy make instances that nobody looked at
    )


Axis = Annotated[
    Annotated[Size, Tag("number")] | Annotated[StrictStr, Field(max_length=MAX_AXIS_CHARS), Tag("string")],
    Discriminator(_json_type),
]


Order = Annotated[tuple[Count, ...], Field(max_length=MAX_RANK + 1, fail_fast=True)]  # one fault is enough


class WrittenBackend(RequestModel):
    """A backend written out: logical shape by axis names, and its stride orders."""

    shape: Annotated[tuple[Axis, ...], Field(min_length=2, max_length=MAX_RANK, fail_fast=True)]
    stride_order: Order | None = None
    layered_stride_order: Order | None = None

    @model_validator(mode="after")
    def _layout_is_valid(self) -> Self:
        self.layout()
        return self

    def layout(self) -> AttentionLayout:
        extents = tuple(parse_extent(axis) for axis in self.shape)
        return AttentionLayout(extents, self.stride_order, self.layered_stride_order)


class KernelMultiple(RequestModel):
    """Every multiple of so many tokens is a block that the kernels accept, up to `max` where that is given."""

    multiple_of: Size
    max: Annotated[Size, Field(le=MAX_KERNEL_BLOCK)] | None = None

    @model_validator(mode="after")
    def _max_is_a_multiple(self) -> Self:
        if self.max is not None and self.max < self.multiple_of:
            raise SpecInvalid(f"max is {self.max}, below multiple_of {self.multiple_of}: no block would be accepted")
        return self


KernelBlockSize = Annotated[
    Annotated[Size, Tag("number")] | Annotated[KernelMultiple, Tag("object")], Discriminator(_json_type)
]
AnyBackend = Annotated[
    Annotated[StrictStr, Tag("string")] | Annotated[WrittenBackend, Tag("object")], Discriminator(_json_type)
]


def kernel_block_sizes(sizes: tuple[int | KernelMultiple, ...]) -> KernelBlockSizes:
    multiple = next((size for size in sizes if isinstance(size, KernelMultiple)), None)
    return KernelBlockSizes(
        listed=tuple(size for size in sizes if isinstance(size, int)),
        multiple_of=None if multiple is None else multiple.multiple_of,
        at_most=None if multiple is None else multiple.max,
    )
