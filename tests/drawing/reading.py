"""Reads a picture back and measures it: what `layout_svg` draws must be true, whoever wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any
from xml.etree import ElementTree

from kvpage.dtypes import item_size_bytes
from kvpage.plans import LayerPlan, Plan

SVG = "{http://www.w3.org/2000/svg}"
ROUNDING_PX = 0.011  # two ends rounded to hundredths
CHAR_EM, WIDE_CHAR_EM = 0.6, 1.0  # of monospace fonts, which are no narrower than what else is used


@dataclass(frozen=True)
class Rect:
    look: str
    x: float
    width: float
    size_bytes: int


@dataclass(frozen=True)
class Bar:
    """The pieces of one `<g data-panel=…>`, in order."""

    panel: str
    of: str
    """Groups of a slab bar, the layer's index of a stride bar."""
    rects: tuple[Rect, ...]

    def bytes_of(self, *looks: str) -> int:
        return sum(rect.size_bytes for rect in self.rects if rect.look in looks or rect.look[:1] in looks)


@dataclass(frozen=True)
class Text:
    text: str
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Picture:
    root: Any
    width: float
    height: float
    bars: tuple[Bar, ...]
    texts: tuple[Text, ...]

    def of(self, panel: str) -> list[Bar]:
        return [bar for bar in self.bars if bar.panel == panel]


def read(svg: str) -> Picture:
    root = ElementTree.fromstring(svg)
    bars = []
    for group in root.iter(f"{SVG}g"):
        rects = [_rect(rect) for rect in group.iter(f"{SVG}rect") if rect.get("data-bytes") is not None]
        of = group.get("data-groups") or group.get("data-layer") or ""
        bars.append(Bar(group.attrib["data-panel"], of, tuple(rects)))
    texts = tuple(_text(text) for text in root.iter(f"{SVG}text"))
    return Picture(root, float(root.attrib["width"]), float(root.attrib["height"]), tuple(bars), texts)


def _rect(rect: Any) -> Rect:
    get = rect.attrib.__getitem__
    return Rect(get("class"), float(get("x")), float(get("width")), int(get("data-bytes")))


def _text(element: Any) -> Text:
    size, x, y = (float(element.attrib[name]) for name in ("font-size", "x", "y"))
    content = "".join(element.itertext())
    width = size * sum(WIDE_CHAR_EM if char > "\u2fff" else CHAR_EM for char in content)
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
    return Text(content, left, left + width, y - 0.75 * size, y + 0.2 * size)


# --- what must be true ------------------------------------------------------------------------------------------------


def overlaps(picture: Picture) -> list[str]:
    """Texts that lie over each other or outside the picture."""
    outside = [text.text for text in picture.texts if text.left < 0 or text.right > picture.width]
    outside += [text.text for text in picture.texts if text.top < 0 or text.bottom > picture.height]
    return outside + [
        f"{one.text!r} over {other.text!r}"
        for one, other in combinations(picture.texts, 2)
        if one.left < other.right and other.left < one.right and one.top < other.bottom and other.top < one.bottom
    ]


def faults(picture: Picture, plan: Plan) -> list[str]:
    """Bars that are not to scale, do not add up, or show other bytes than the plan's tensors have."""
    found = []
    for bar in picture.of("slab"):
        total = sum(rect.size_bytes for rect in bar.rects)
        if total != plan.slab_bytes:
            found.append(f"groups {bar.of}: {total} bytes of {plan.slab_bytes}")
        for group in map(int, bar.of.split()):
            expected = _expected(plan, group)
            shown = (bar.bytes_of("h"), bar.bytes_of("pad"), bar.bytes_of("free"))
            if shown != expected:
                found.append(f"group {group}: data, padding and unused {shown}, not {expected}")
    scales: dict[str, list[Bar]] = {}
    for bar in picture.bars:
        scales.setdefault(f"stride {bar.of}" if bar.panel == "stride" else bar.panel, []).append(bar)
    for panel, bars in scales.items():
        rects = [rect for bar in bars for rect in bar.rects]
        found += _off_scale(panel, rects)
        for bar in bars:
            found += _overlapping(panel, bar)
    for bar in picture.of("stride"):
        found += _stride_faults(bar, list(plan.layers.values())[int(bar.of)])
    return found


def _off_scale(panel: str, rects: list[Rect]) -> list[str]:
    largest = max(rects, key=lambda rect: rect.size_bytes, default=None)
    if largest is None or largest.size_bytes == 0:
        return []
    px_per_byte = largest.width / largest.size_bytes
    slack = ROUNDING_PX * 2
    wrong = [rect for rect in rects if abs(rect.width - rect.size_bytes * px_per_byte) > slack]
    return [f"{panel}: {rect} is not to scale" for rect in wrong]


def _overlapping(panel: str, bar: Bar) -> list[str]:
    pairs = zip(bar.rects, bar.rects[1:], strict=False)
    return [f"{panel}: {right} begins inside {left}" for left, right in pairs if left.x + left.width > right.x + 0.03]


def _stride_faults(bar: Bar, layer: LayerPlan) -> list[str]:
    """Two blocks: their bytes are twice the stride, and the second begins where the tensor says."""
    view = layer.tensors[0]
    stride = view.strides_bytes[view.block_axis] * view.kernel_blocks_per_block
    total = sum(rect.size_bytes for rect in bar.rects)
    if total != 2 * stride:
        return [f"layer {layer.name}: two blocks of {total} bytes, the stride is {stride}"]
    half = len(bar.rects) // 2
    step = (bar.rects[half].x - bar.rects[0].x) / (bar.rects[-1].x + bar.rects[-1].width - bar.rects[0].x)
    return [] if abs(step - 0.5) < 0.001 else [f"layer {layer.name}: block i + 1 is drawn {step} along"]


def _expected(plan: Plan, group: int) -> tuple[int, int, int]:
    """Bytes of data, padding and neither that a slab of the group has, from its tensors' shapes."""
    blocks = plan.groups[group].blocks_per_slab
    layers = [layer for layer in plan.layers.values() if layer.group == group and layer.kv_sharing_target is None]
    data = sum(_data_bytes(layer) for layer in layers)
    pages = sum(layer.page_size_bytes for layer in layers)
    return data * blocks, (pages - data) * blocks, plan.slab_bytes - pages * blocks


def _data_bytes(layer: LayerPlan) -> int:
    return sum(
        prod(view.shape) // view.shape[view.block_axis] * view.kernel_blocks_per_block * item_size_bytes(view.dtype)
        for view in layer.tensors
    )


def owned_bytes(plan: Plan, group: int, slab: int) -> list[tuple[int, str]]:
    """(address, tensor) of every byte that the group's tensors have in the slab, by walking all indices. Slow."""
    blocks = plan.groups[group].blocks_per_slab
    found = []
    for layer in plan.layers.values():
        if layer.group != group or layer.kv_sharing_target is not None:
            continue
        for view in layer.tensors:
            per_slab = blocks * view.kernel_blocks_per_block
            addresses = [view.offset_bytes]
            for axis, (extent, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True)):
                steps = range(slab * per_slab, (slab + 1) * per_slab) if axis == view.block_axis else range(extent)
                addresses = [address + step * stride for address in addresses for step in steps]
            item = item_size_bytes(view.dtype)
            found += [(address + byte, f"{layer.name}/{view.name}") for address in addresses for byte in range(item)]
    return sorted(found)


def runs(owned: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """(address, bytes) of contiguous bytes of one tensor."""
    found: list[list[Any]] = []
    for address, tensor in owned:
        if found and found[-1][0] + found[-1][1] == address and found[-1][2] == tensor:
            found[-1][1] += 1
        else:
            found.append([address, 1, tensor])
    return [(start, size) for start, size, _ in found]


def doctored(svg: str, pattern: str, change: Any) -> str:
    """The picture with the first number that `pattern` finds (its group 1) changed."""
    match = re.search(pattern, svg)
    assert match is not None, pattern
    return svg[: match.start(1)] + str(change(float(match[1]))) + svg[match.end(1) :]
