#!/usr/bin/env python3
"""A switch in userspace that delays every frame, for kernels without netem.

    wire.py --delay-ms 20 lab0 lab1

It makes a TAP device of each name and carries frames between them. The devices live as long as
this process. Needs /dev/net/tun and the right to make devices; standard library only.
"""

import argparse
import collections
import fcntl
import os
import select
import struct
import time
from pathlib import Path

# From linux/if_tun.h.
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN = 1, 2, 4, 8
# Size of virtio_net_hdr, which precedes the frame: with it a frame may be a whole train of TCP
# segments, and the switch is called once for all of them.
HEADER = 10
LARGEST_FRAME = 1 << 17
FRAMES_PER_TURN = 16


def open_tap(name: str) -> int:
    """Makes a TAP device that carries trains of TCP segments; returns its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN)
    return device


class Switch:
    """Carries frames between devices, each after the same delay.

    Args:
        devices: File descriptors of TAP devices.
        delay_s: Seconds from reading a frame to writing it.
    """

    def __init__(self, devices: list[int], delay_s: float) -> None:
        self._devices, self._delay_s = devices, delay_s
        self._address_of: dict[bytes, int] = {}
        # In the order of their departure: the delay is the same for all.
        self._under_way: collections.deque[tuple[float, list[int], bytes]] = collections.deque()
        self._poll = select.epoll()
        for device in devices:
            self._poll.register(device, select.EPOLLIN)

    def run(self) -> None:
        """Carries frames for ever."""
        while True:
            timeout = -1.0
            if self._under_way:
                timeout = max(0.0, self._under_way[0][0] - time.monotonic())
            for device, _ in self._poll.poll(timeout):
                self._take_from(device)
            self._deliver()

    def _take_from(self, device: int) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = os.read(device, LARGEST_FRAME)
            except OSError:
                # Nothing more to read, or the link is down.
                return
            destination, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            self._address_of[source] = device
            known = self._address_of.get(destination)
            others = [other for other in self._devices if other != device]
            targets = others if known is None else [known] if known != device else []
            self._under_way.append((time.monotonic() + self._delay_s, targets, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, targets, frame = self._under_way.popleft()
            for target in targets:
                try:
                    os.write(target, frame)
                except OSError:
                    # The link is down or its queue is full: a switch drops the frame.
                    continue


def main() -> None:
    """Runs the switch until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, required=True, help="in each direction")
    parser.add_argument("--pid", type=Path, help="file for its process id, once it is ready")
    parser.add_argument("devices", nargs="+", help="names of the TAP devices to make")
    args = parser.parse_args()
    switch = Switch([open_tap(name) for name in args.devices], args.delay_ms / 1e3)
    if args.pid is not None:
        args.pid.write_text(str(os.getpid()))
    switch.run()


if __name__ == "__main__":
    main()
