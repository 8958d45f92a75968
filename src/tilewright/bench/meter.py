"""Clocks and power of a GPU while something runs, from NVML, else nvidia-smi, else none."""

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NVML_PERIOD_S, SMI_PERIOD_S = 0.02, 0.25  # nvidia-smi starts a process each time
QUERY = "clocks.sm,clocks.mem,power.draw"

Reader = Callable[[], tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. time_s: of time.monotonic. None for what the driver does not say."""

    time_s: float
    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None


class Meter:
    """Samples in the background between `with` and its end.

    read: returns SM clock, memory clock (MHz) and power (W), each or None. None where there is
        nothing to read; no thread is started then.
    """

    def __init__(self, read: Reader | None, period_s: float = NVML_PERIOD_S) -> None:
        self._read = read
        self._period_s = period_s
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Meter":
        if self._read is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[str]]:
        """A list that holds the summary of what was sampled, once the context ends."""
        start = time.monotonic()
        summary: list[str] = []
        yield summary
        summary.append(summarised([s for s in self._samples if s.time_s >= start] or self._samples[-1:]))

    def _run(self) -> None:
        assert self._read is not None
        while not self._stop.is_set():
            try:
                sm, memory, power = self._read()
            except (OSError, ValueError, RuntimeError):  # the driver stopped answering; earlier samples are kept
                return
            self._samples.append(Sample(time.monotonic(), sm, memory, power))
            self._stop.wait(self._period_s)


def summarised(samples: list[Sample]) -> str:
    """`1755..1980 MHz, 3201 MHz, 412 W`, "" for no sample.

    That is lowest and highest SM clock, memory clock, mean power.
    """
    sm, memory, power = ([v for s in samples if (v := getattr(s, name)) is not None] for name in ("sm_mhz", "memory_mhz", "power_w"))
    parts = []
    if sm:
        parts.append(f"{max(sm):.0f} MHz" if min(sm) == max(sm) else f"{min(sm):.0f}..{max(sm):.0f} MHz")
    if memory:
        parts.append(f"{statistics.median(memory):.0f} MHz")
    if power:
        parts.append(f"{statistics.fmean(power):.0f} W")
    return ", ".join(parts)


def meter_of(uuid: str) -> Meter:
    """The meter of the GPU of this UUID ("GPU-...").

    It reads nothing where neither NVML nor nvidia-smi answers.
    """
    nvml = _nvml_reader(uuid)
    return Meter(nvml) if nvml else Meter(_smi_reader(uuid), SMI_PERIOD_S)


def _nvml_reader(uuid: str) -> Reader | None:
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None

    def ask(function: Callable[..., float], *args: int) -> float | None:
        try:
            return float(function(handle, *args))
        except nvml.NVMLError:  # a virtual machine may hide one and tell the others
            return None

    def read() -> tuple[float | None, ...]:
        power = ask(nvml.nvmlDeviceGetPowerUsage)
        clock = nvml.nvmlDeviceGetClockInfo
        return ask(clock, nvml.NVML_CLOCK_SM), ask(clock, nvml.NVML_CLOCK_MEM), None if power is None else power / 1000

    return read


def _smi_reader(uuid: str) -> Reader | None:
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]

    def read() -> tuple[float | None, ...]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(done.stderr.strip())
        return parse_smi(done.stdout)

    try:
        read()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return read


def parse_smi(text: str) -> tuple[float | None, ...]:
    """`1980, 3201, 412.35`, or [N/A] for what is unknown. Raises ValueError for anything else."""
    cells = [cell.strip() for cell in text.strip().split(",")]
    if len(cells) != 3:
        raise ValueError(f"nvidia-smi must print 3 numbers, got {text!r}")
    return tuple(None if cell.startswith("[") else float(cell) for cell in cells)
