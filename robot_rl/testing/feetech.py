"""Fake Feetech STS3215 servos that answer packets on a pseudo-terminal, for tests without an SO-101.

LeRobot and the vendor's SDK talk to it as to /dev/ttyACM0. Packets as in Feetech's STS protocol 0:
`FF FF id length instruction parameters checksum`, answered by `FF FF id length error data checksum`.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import tty
from collections.abc import Iterator

_HEADER = b"\xff\xff"
_BROADCAST = 0xFE
_PING, _READ, _WRITE, _SYNC_READ, _SYNC_WRITE = 0x01, 0x02, 0x03, 0x82, 0x83
_MODEL, _MIN, _MAX, _OFFSET = 3, 9, 11, 31
_TORQUE, _GOAL, _POSITION, _STATUS = 40, 42, 56, 65
_STS3215 = 777
OVERLOAD = 0x20
"""Bit of a servo's status and of the error byte of every answer."""


class FakeServo:
    """Registers of one servo, and a motor that turns to the goal at constant speed."""

    def __init__(self, number: int, *, position: int = 2048, speed_per_s: float = 3000.0) -> None:
        """Makes a servo; positions are in 1/4096 of a turn."""
        self.number = number
        self.registers = bytearray(128)
        self.silent = False
        """It does not answer, as with an unplugged cable."""
        self.corrupt = False
        """Its answers have a wrong checksum."""
        self._position, self._speed_per_s, self._moved_s = float(position), speed_per_s, time.monotonic()
        self.put(_MODEL, _STS3215)
        self.put(_MIN, 0)
        self.put(_MAX, 4095)
        self.put(_GOAL, position)

    def put(self, address: int, value: int) -> None:
        """Writes a register of two bytes."""
        self.registers[address : address + 2] = value.to_bytes(2, "little")

    def get(self, address: int) -> int:
        """Reads a register of two bytes."""
        return int.from_bytes(self.registers[address : address + 2], "little")

    @property
    def goal(self) -> int:
        return self.get(_GOAL)

    @property
    def is_stiff(self) -> bool:
        return bool(self.registers[_TORQUE])

    def calibrate(self, *, low: int, high: int, offset: int = 0) -> None:
        """Writes what LeRobot compares with its calibration file."""
        for address, value in ((_MIN, low), (_MAX, high), (_OFFSET, offset)):
            self.put(address, value)

    def overload(self, is_on: bool = True) -> None:
        """Raises or lowers the overload flag."""
        self.registers[_STATUS] = OVERLOAD if is_on else 0

    def answer(self, instruction: int, parameters: bytes) -> bytes | None:
        """Returns the status packet, or None if the servo is silent."""
        self._move()
        content = b""
        if instruction == _READ:
            address, length = parameters
            content = bytes(self.registers[address : address + length])
        elif instruction == _WRITE:
            self.store(parameters[0], parameters[1:])
        if self.silent:
            return None
        packet = frame(self.number, self.registers[_STATUS], content)
        return packet[:-1] + bytes([packet[-1] ^ 0x55]) if self.corrupt else packet

    def store(self, address: int, content: bytes) -> None:
        """Writes registers; a silent servo ignores it."""
        self._move()
        if not self.silent:
            self.registers[address : address + len(content)] = content

    def _move(self) -> None:
        now_s = time.monotonic()
        reach, self._moved_s = self._speed_per_s * (now_s - self._moved_s), now_s
        if self.is_stiff:
            self._position += max(-reach, min(reach, self.goal - self._position))
        self.put(_POSITION, round(self._position))


class FakeFeetechBus:
    """A bus of servos at `port`, answered by a thread; `with FakeFeetechBus(...) as bus`."""

    def __init__(self, servos: list[FakeServo], *, byte_s: float = 10e-6) -> None:
        """Makes the pseudo-terminal.

        Args:
            servos: on the bus.
            byte_s: time of a byte on the wire: 10 bits at 1 Mbit/s.
        """
        self.servos = {servo.number: servo for servo in servos}
        self._byte_s = byte_s
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        self.port = os.ttyname(self._slave)
        self._inbox = b""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake servos", daemon=True)

    def __enter__(self) -> FakeFeetechBus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bus, as an unplugged USB cable does."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            os.close(self._master)
            os.close(self._slave)

    def _run(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            with contextlib.suppress(OSError):
                self._inbox += os.read(self._master, 4096)
            for number, instruction, parameters in self._packets():
                answers = b"".join(self._answers(number, instruction, parameters))
                if answers:
                    time.sleep((len(answers) + len(parameters) + 6) * self._byte_s)
                    os.write(self._master, answers)

    def _packets(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields id, instruction and parameters of whole packets; damaged packets are skipped."""
        while (start := self._inbox.find(_HEADER)) >= 0 and len(self._inbox) >= start + 4:
            if self._inbox[start + 2] == 0xFF:  # no id: the header begins one byte later
                self._inbox = self._inbox[start + 1 :]
                continue
            end = start + 4 + self._inbox[start + 3]
            if len(self._inbox) < end:
                return
            packet, self._inbox = self._inbox[start:end], self._inbox[end:]
            if len(packet) >= 6 and packet == frame(packet[2], packet[4], packet[5:-1]):
                yield packet[2], packet[4], packet[5:-1]

    def _answers(self, number: int, instruction: int, parameters: bytes) -> Iterator[bytes]:
        if instruction == _SYNC_WRITE:
            address, length, rows = parameters[0], parameters[1], parameters[2:]
            for at in range(0, len(rows), length + 1):
                if (servo := self.servos.get(rows[at])) is not None:
                    servo.store(address, rows[at + 1 : at + 1 + length])
            return
        addressed = list(self.servos) if number == _BROADCAST else [number]
        if instruction == _SYNC_READ:
            addressed, instruction, parameters = list(parameters[2:]), _READ, parameters[:2]
        for one in addressed:
            if (servo := self.servos.get(one)) is None:
                continue
            packet = servo.answer(instruction, parameters)
            if packet is not None:
                yield packet


def frame(number: int, code: int, content: bytes) -> bytes:
    """Returns a packet; `code` is the instruction of a request or the error byte of an answer."""
    body = bytes([number, len(content) + 2, code]) + content
    return _HEADER + body + bytes([~sum(body) & 0xFF])
