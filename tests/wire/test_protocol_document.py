"""docs/protocol.md says what the code does: every message, every field, and the bytes of its example."""

from __future__ import annotations

import re
import typing

import msgspec
import pytest

from kvpage.pages import arrays, holding_arrays, lease_records
from kvpage.wire import channel, leasing, messages, succession
from kvpage.wire.channel import Frame, FrameReader, header
from support.checkout import ROOT

TEXT = (ROOT / "docs" / "protocol.md").read_text()
EPOCH = "0123456789abcdef" * 2
REQUEST = messages.RequestFrame(id=1, body=messages.Hello(version=1, role="client", client_name="c"))
WELCOME = messages.Welcome(
    version=1, epoch=EPOCH, device="host", worker_pid=7, handle_kinds=["memfd"], max_frame_bytes=8 << 20
)
REPLY = messages.ReplyFrame(id=1, epoch=EPOCH, body=WELCOME)


def example(name: str) -> bytes:
    found = re.search(rf"^```hex {name}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no example {name}"
    return bytes.fromhex(found[1])


def in_hex(data: bytes) -> str:
    """As the document shows it, to be copied there."""
    return "\n".join(data[start : start + 16].hex(" ") for start in range(0, len(data), 16))


@pytest.mark.parametrize(("name", "frame"), [("request", REQUEST), ("reply", REPLY)])
def test_the_example_is_what_goes_over_the_wire(name: str, frame: messages.RequestFrame | messages.ReplyFrame) -> None:
    payload = messages.encode(frame)
    data = header(len(payload), 0) + payload
    assert example(name) == data, f"the document should have\n{in_hex(data)}"


def test_the_example_can_be_read_back() -> None:
    reader = FrameReader()
    reader.feed(example("request") + example("reply"))
    frames = [reader.take(), reader.take()]
    assert all(isinstance(frame, Frame) for frame in frames)
    assert messages.decode_request(typing.cast(Frame, frames[0]).payload) == REQUEST
    assert messages.decode_reply(typing.cast(Frame, frames[1]).payload) == REPLY


def section(request: str) -> str:
    found = re.search(rf"^### {request}\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def missing_fields(kind: type[msgspec.Struct], text: str) -> list[str]:
    return [field for field in kind.__struct_fields__ if f"`{field}`" not in text]


REQUESTS = typing.get_args(messages.RequestBody)
REPLY_TO: dict[type[msgspec.Struct], type[msgspec.Struct]] = {
    messages.Hello: messages.Welcome,
    messages.DescribeDevice: messages.DeviceState,
    messages.CreatePool: messages.PoolCreated,
    messages.ListPools: messages.PoolList,
    messages.GetPool: messages.PoolState,
    messages.FindPool: messages.PoolState,
    messages.WaitPool: messages.PoolState,
    messages.DeletePool: messages.PoolDeleted,
    messages.Attach: messages.Attached,
    messages.Detach: messages.Detached,
    messages.ExportPool: messages.Exported,
    messages.AdoptPool: messages.PoolState,
    succession.FinishAdoption: succession.AdoptionFinished,
    succession.TakeOver: succession.TakenOver,
    succession.TakeConnection: succession.ConnectionTaken,
    succession.FinishTakeOver: succession.TakeOverFinished,
    succession.DrainWorker: succession.WorkerDrained,
    leasing.OpenLease: leasing.LeaseOpened,
    leasing.AdoptLease: leasing.LeaseOpened,
    leasing.RenewLease: leasing.LeaseRenewed,
    leasing.CloseLease: leasing.LeaseClosed,
    leasing.TakeStep: leasing.Granted,
    leasing.TakePrefix: leasing.PrefixTaken,
    leasing.FindPrefix: leasing.PrefixFound,
    leasing.Reserve: leasing.Reserved,
    leasing.CommitReservation: leasing.Granted,
    leasing.EndReservation: leasing.ReservationEnded,
    leasing.DescribeLease: leasing.LeaseDescribed,
    leasing.ListHeld: leasing.HeldList,
    leasing.InspectBlocks: leasing.BlocksInspected,
    leasing.FindContents: leasing.ContentsFound,
    leasing.DescribeBlocks: leasing.BlocksState,
    leasing.MapBlocks: leasing.BlockMap,
    leasing.SetTenants: leasing.TenantsSet,
    leasing.ReadEvents: leasing.EventList,
    leasing.ListContents: leasing.ContentList,
    leasing.ClearContents: leasing.ContentsCleared,
}
DESCRIBED_ONCE = (messages.PoolState, leasing.LeaseOpened, leasing.Granted)  # beside one of the requests they answer


PARTS = (
    messages.Holder,
    messages.WireError,
    messages.ChunkInfo,
    leasing.ComputedBlocks,
    leasing.GroupBlocks,
    leasing.TenantState,
    leasing.TenantSettings,
    leasing.LeaseState,
    leasing.PrefixState,
    leasing.Latency,
    leasing.ContentEvent,
)


def type_name(kind: type[msgspec.Struct]) -> str:
    return str(msgspec.inspect.type_info(kind).tag)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_request_has_a_section_with_its_fields_and_its_reply(kind: type[msgspec.Struct]) -> None:
    text, reply = section(type_name(kind)), REPLY_TO[kind]
    assert text
    assert missing_fields(kind, text) == []
    assert f"`{type_name(reply)}`" in text
    if reply not in DESCRIBED_ONCE:
        assert missing_fields(reply, text) == []


@pytest.mark.parametrize("kind", [*DESCRIBED_ONCE, *PARTS], ids=lambda kind: kind.__name__)
def test_the_parts_of_messages_are_described(kind: type[msgspec.Struct]) -> None:
    described = TEXT.replace('"', "`")
    assert missing_fields(kind, described) == []


def test_the_check_of_fields_fires() -> None:
    assert missing_fields(messages.GetPool, "Field `pool`.") == ["pool_id"]
    assert section("no_such_request") == ""


@pytest.mark.parametrize(
    "number",
    [
        f"{channel.MAX_FRAME_BYTES:,}",
        f"0 to {channel.MAX_FDS_PER_FRAME}",
        f"at most {messages.MAX_PLAN_BYTES >> 20} MiB",
        f"the first {messages.MAX_HOLDERS_NAMED} of them",
        f"0 to {messages.MAX_WAIT_S}",
        f"| float, 0 to {leasing.MAX_TTL_S:.0f} |",
        f"| float, 0 to {leasing.MAX_KEEP_S:.0f} |",
        f"up to {leasing.MAX_RESERVED_S:.0f},",
        f"at most {leasing.MAX_BLOCKS_GRANTED:,} blocks",
        f"the first {leasing.MAX_LEASES_NAMED} leases",
        f"{holding_arrays.MAX_HOLDERS:,} leases and reservations",
        f"`{holding_arrays.MAGIC.to_bytes(8, 'little')[:7].decode()}`",
        f"`{arrays.MAGIC.to_bytes(8, 'little')[:7].decode()}`",
        f"`{lease_records.MAGIC.to_bytes(8, 'little')[:7].decode()}`",
        f"{lease_records.RECORDS_BYTES:,} bytes",
        f"This is version {messages.PROTOCOL_VERSION}.",
    ],
)
def test_the_limits_it_names_are_those_of_the_code(number: str) -> None:
    assert number in TEXT
