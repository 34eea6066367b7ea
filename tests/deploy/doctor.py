"""Reads what the doctor has found in a container or a unit."""

from containers import Failed, allowed


def report(found, memlock):
    """The doctor has found rdma-core, a server over shared memory, and this RLIMIT_MEMLOCK."""
    if not found["library"]["found"]:
        raise Failed("the doctor has not found rdma-core's libraries")
    limits = found["memlock"]
    if limits["wanted"] > memlock:
        raise Failed(f"the whole pool needs {limits['wanted']} bytes, and RLIMIT_MEMLOCK is to be {memlock}")
    if limits["hard"] != allowed(memlock):
        raise Failed(f"RLIMIT_MEMLOCK is {limits['hard']}, and not {allowed(memlock)}")
    if (peer := found["peer"])["path"] != "shm":
        raise Failed(f"the doctor's calls use {peer['path']}: {peer['reason']}")
