"""Inside the sandbox's door: a script (`python -I -S jail.py SPEC-FD STATUS-FD`) that locks itself in and then
runs one command. Standard library only; nothing of ours is imported.

    outside   sandbox.py: waits, kills at the time limit
    J         this process: new mount, network, process and IPC namespaces, then waits
    1         the first process in them: dies with J, and all others with it
    2         the command: another user, no capability, nothing but read-only system folders and a small /work, and a
              filter on system calls that would make new namespaces or look into other processes

A step that the kernel refuses ends it here, with a sentence in STATUS-FD: the command is then never started.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
SPACES = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
KEPT = {os.ST_NOSUID: NOSUID, os.ST_NODEV: NODEV, os.ST_NOEXEC: NOEXEC, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048}
KEPT[getattr(os, "ST_RELATIME", 4096)] = 1 << 21
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Refused to the command: what would give it namespaces (and in them memory that nobody limits) or a view of others.
CLONE, CLONE3, ARCHITECTURE = "clone", 435, "architecture"
CALLS = {
    "x86_64": {ARCHITECTURE: 0xC000003E, CLONE: 56, "unshare": 272, "setns": 308, "mount": 165, "ptrace": 101,
               "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249, "perf_event_open": 298,
               "userfaultfd": 323, "io_uring_setup": 425},
    "aarch64": {ARCHITECTURE: 0xC00000B7, CLONE: 220, "unshare": 97, "setns": 268, "mount": 40, "ptrace": 117,
                "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218, "perf_event_open": 241,
                "userfaultfd": 282, "io_uring_setup": 425},
}  # fmt: skip
DEVICES = ("null", "zero", "random", "urandom")
REFUSED = 120  # exit status


def main() -> None:
    spec_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(spec_fd) as file:
        spec = json.load(file)
    try:
        spec["uid"] = _separate()
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != spec["parent"]:  # gone before that was said
            os._exit(REFUSED)
        _build(spec)
    except OSError as error:
        os.write(status_fd, f"{error.strerror} ({error.filename})".encode())
        os._exit(REFUSED)
    os.set_inheritable(status_fd, False)  # closed at last when the command starts
    first = os.fork()
    if not first:
        _reign(spec, status_fd)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(first, signal.SIGKILL))
    os.close(status_fd)
    os._exit(_code(os.waitpid(first, 0)[1]))  # the first process is gone when all others are


def _separate() -> int:
    """Namespaces of our own: as root directly; as anyone else, or where root may not, through a user namespace. Returns
    the user that the command is to become; 0: it stays who it is, which is not root."""
    uid = 200_000 + os.getpid() % 1_000_000  # nobody's: a limit on processes counts those of one user
    if os.geteuid() == 0 and not LIBC.unshare(SPACES):
        return uid
    if os.geteuid() == 0:
        _be(uid)
        LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", NEWUSER | SPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return 0


def _be(uid: int) -> None:
    """From root, and with it goes every capability."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _build(spec: dict[str, Any]) -> None:
    """A root of a few read-only folders, and /work."""
    root, size = spec["root"], spec["disk_bytes"]
    _mount(None, "/", None, REC | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for folder in spec["folders"]:
        _show(folder, root)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name in DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            _mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    os.makedirs(f"{root}/work")
    if not os.path.exists(f"{root}/tmp"):  # an interpreter may live below the real one
        os.symlink("work", f"{root}/tmp")
    _mount("tmpfs", f"{root}/work", "tmpfs", NOSUID | NODEV, f"size={size},mode=777")
    for name, text in spec["files"].items():
        with open(f"{root}/work/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    _mount(None, root, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(root)
    if LIBC.syscall(PIVOT_ROOT[platform.machine()], b".", b"."):
        raise _refusal("pivot_root")
    _call("umount2", b".", DETACH)
    os.chdir("/work")


def _show(folder: str, root: str) -> None:
    """A folder of the system at its own place, read-only; a link as the link that it is."""
    inside = root + folder
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(folder):
        os.symlink(os.readlink(folder), inside)
        return
    os.makedirs(inside, exist_ok=True)
    _mount(folder, inside, None, BIND | REC)
    held = os.statvfs(folder).f_flag  # what a mount forbids already must stay forbidden
    kept = sum(flag for found, flag in KEPT.items() if held & found and flag != NOEXEC)
    _mount(None, inside, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | kept)


def _reign(spec: dict[str, Any], status_fd: int) -> NoReturn:
    """As the first process of the namespace: the command is another one, and all end with this."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if not child:
        try:
            _become(spec)
        except OSError as error:
            os.write(status_fd, f"{error.strerror} ({error.filename})".encode())
        finally:
            os._exit(REFUSED)
    os.close(status_fd)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(_code(status))


def _become(spec: dict[str, Any]) -> NoReturn:
    os.setsid()
    for name, value in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if spec["uid"]:
        _be(spec["uid"])
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_calls()
    os.execve(spec["command"][0], spec["command"], spec["environment"])


class _Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("program", ctypes.c_void_p))


def _filter_calls() -> None:
    """A program for the kernel's filter: every instruction is code, jump if true, jump if false, operand."""
    calls = CALLS[platform.machine()]
    denied = [number for name, number in calls.items() if name not in (ARCHITECTURE, CLONE)]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    deny, missing, allow, kill = 0x50000 | 1, 0x50000 | 38, 0x7FFF0000, 0x80000000  # EPERM, ENOSYS
    body = [(equal, 0, 1, number) for number in denied]
    steps = [(load, 0, 0, 4), (equal, 1, 0, calls[ARCHITECTURE]), (give, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # another numbering of the same calls
    for test in body:
        steps += [test, (give, 0, 0, deny)]
    steps += [(equal, 0, 1, CLONE3), (give, 0, 0, missing)]  # its flags lie in memory; libc falls back to clone
    steps += [(equal, 0, 3, calls[CLONE]), (load, 0, 0, 16), (any_bit, 0, 1, NEWUSER | SPACES), (give, 0, 0, deny)]
    steps += [(give, 0, 0, allow)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code)
    program = _Filter(len(steps), ctypes.addressof(held))
    _call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def _code(status: int) -> int:
    """As a shell has it: 128 and the signal's number."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    if LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]):
        raise _refusal(f"mount {target}")


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments):
        raise _refusal(name)


def _refusal(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main()
