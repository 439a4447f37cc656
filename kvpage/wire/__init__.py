"""The protocol between a device worker and its clients: frames and file descriptors on a Unix socket."""
