"""Counting host syncs, under the name it had before: see `kimivl_lab.syncs.counter`."""

from ..syncs.counter import HostSyncCounter, HostSyncError, count_host_syncs, on_device

__all__ = ["HostSyncCounter", "HostSyncError", "count_host_syncs", "on_device"]
