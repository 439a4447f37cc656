"""Every check, the most valuable first, with how long it may take."""

from __future__ import annotations

from gpu_checks.outcome import Check

MACHINE = Check(name="machine", title="A GPU whose driver answers", function="gpu_checks.machine:describe", limit_s=60)


def _check(name: str, function: str, title: str, limit_s: float = 30) -> Check:
    return Check(name=name, title=title, function=f"gpu_checks.{function}", limit_s=limit_s)


def _alone(name: str, function: str, title: str, limit_s: float = 30) -> Check:
    return Check(name=name, title=title, function=f"gpu_checks.{function}", limit_s=limit_s, alone=True)


CHECKS = (
    _check("uuid", "machine:same_device_for_torch", "A UUID names the same device for kvpage and torch"),
    _check("share-driver", "sharing:by_driver", "Unrelated processes share memory by descriptor; driver writes"),
    _check("share-kernel", "sharing:by_kernel", "… kernel writes, seen by kernels on the other side"),
    _check("dlpack", "views:by_dlpack", "`from_dlpack` and `as_strided` for bf16 and fp8 in a kernel"),
    _check("graph", "views:in_a_graph", "… in a captured CUDA graph, replayed after another process's write"),
    _check("worker-killed", "service:worker_killed", "`kvpage serve`: worker SIGKILLed, the client goes on", 60),
    _check("exporter-killed", "ending:exporter", "Who made the memory is SIGKILLed, who mapped it goes on"),
    _alone("importer-killed", "ending:importer", "Client SIGKILLed during a kernel: its memory becomes free", 40),
    _alone("strides", "strides:sweep", "Paged attention reads, by block stride", 50),
    _alone("latency", "latency:by_size", "Latency of create, export, import, map, unmap", 40),
    _check("fresh-thread", "mapping:in_a_fresh_thread", "Mapping in a thread with no context"),
    _alone("no-context", "fresh:holding_costs_no_context", "Who holds memory as a worker does has no context"),
    _check("zero", "fresh:is_zero", "New pools are zero (and is the driver's fresh memory?)"),
    _alone("cycles", "mapping:cycles", "200 × import, map, close leave nothing behind"),
    _alone("attach-cycles", "service:attach_cycles", "200 × `kvpage.attach`, close leave nothing behind", 50),
    _alone("close-waits", "mapping:closed_under_kernels", "`close` waits for running kernels"),
    _check("capture", "views:closed_during_capture", "Closing one mapping while a graph over another is captured"),
    _check("exit", "views:alive_at_exit", "Ending a process with live tensors"),
    _check("namespaces", "namespaces:by_descriptor", "Sharing with other PID and IPC namespaces: `cuda_vmm`"),
    _check("ipc", "sharing:by_handle", "`cuda_ipc`: shared by 64-byte handle"),
    _check("ipc-namespaces", "namespaces:by_handle", "`cuda_ipc`: in other PID and IPC namespaces"),
    _alone("ipc-latency", "latency:by_handle", "`cuda_ipc`: latency of open and close"),
    _alone("paged-kernels", "paged:kernels", "FlashAttention and FlashInfer, where installed, by block stride", 60),
    _alone("largest", "latency:largest", "Latency for the largest chunk that fits (80 % of what is free)", 40),
    _alone("read-only", "sharing:read_only", "Read-only mapping: reads work, a driver write fails"),
    _alone("read-only-kernel", "sharing:read_only_for_kernels", "… a kernel's write fails"),
    _alone("ipc-holder", "ending:ipc_holder", "`cuda_ipc`: its holder is SIGKILLed"),
    _alone("unmap-waits", "mapping:unmapped_under_kernels", "Whether the driver's unmap waits for running kernels"),
)
