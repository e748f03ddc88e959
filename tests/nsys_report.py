"""A capture of Nsight Systems made up on its real schema: decode steps of a small transformer on two streams of a GPU.

The times are whole nanoseconds from a formula, so the file is the same everywhere. Run as a script, it writes the file
that NVIDIA's `nsys stats` was given to print `tests/interop/nsys_stats/*.csv`.
"""

import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

PID, TID = 4242, 4250
GLOBAL_PID = (1 << 48) | (PID << 24)
GLOBAL_TID = GLOBAL_PID | TID

KERNELS = (
    ("void rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, float)", 2_100, (64, 1, 1), (1024, 1, 1), 32),
    ("nvjet_tst_128x64_64x8_2x1_v_bz_TNN", 21_400, (96, 2, 1), (384, 1, 1), 168),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", 1_700, (64, 1, 1), (512, 1, 1), 30),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(...)", 1_500, (64, 1, 1), (512, 1, 1), 24),
    (
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(Params)",
        14_900,
        (1, 8, 64),
        (128, 1, 1),
        255,
    ),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 9_300, (24, 1, 1), (544, 1, 1), 96),
    (
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>(c10::BFloat16*)",
        3_000,
        (64, 1, 1),
        (1024, 1, 1),
        28,
    ),
)
ORDER = (0, 1, 2, 3, 4, 1, 5, 0, 1, 6, 1, 5)
"""Kernels of one layer, in order."""

MINIMAL = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE {meta} (name TEXT NOT NULL, value TEXT);
CREATE TABLE META_DATA_CAPTURE (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT, cuDevice INTEGER, maxWarpsPerSm INTEGER,
    maxBlocksPerSm INTEGER, maxRegistersPerSm INTEGER, maxShmemPerSm INTEGER, computeMajor INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, {green}
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
    mangledName INTEGER, registersPerThread INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER,
    blockY INTEGER, blockZ INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER,
    localMemoryPerThread INTEGER, localMemoryTotal INTEGER, gridId INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER, value INTEGER, bytes INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, text TEXT, textId INTEGER,
    globalTid INTEGER, endGlobalTid INTEGER, domainId INTEGER);
"""
"""The columns that are filled here, where the whole schema is not at hand."""

SCHEMA_2022 = MINIMAL.format(meta="EXPORT_META_DATA", green="")
SCHEMA_2023 = MINIMAL.format(meta="META_DATA_EXPORT", green="greenContextId INTEGER,")


class Report:
    """Fills a database row by row, leaving out the columns that its schema lacks."""

    def __init__(self, path: Path, schema: str) -> None:
        self.database = sqlite3.connect(path)
        self.database.executescript(schema)
        tables = [name for (name,) in self.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {
            name: [(row[1], row[2], row[3]) for row in self.database.execute(f"PRAGMA table_info({name})")]
            for name in tables
        }
        self.texts: dict[str, int] = {}

    def text(self, value: str) -> int:
        if value not in self.texts:
            self.texts[value] = len(self.texts) + 1
            self.add("StringIds", id=self.texts[value], value=value)
        return self.texts[value]

    def add(self, table: str, **values: Any) -> None:
        """A row; columns that must hold something and are not given hold 0 or an empty text."""
        row = {}
        for name, kind, needed in self.columns[table]:
            if name in values:
                row[name] = values[name]
            elif needed:
                row[name] = "" if kind == "TEXT" else 0
        marks = ", ".join("?" * len(row))
        self.database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    def call(self, name: str, start: int, end: int, correlation: int) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            globalTid=GLOBAL_TID,
            correlationId=correlation,
            nameId=self.text(name),
        )

    def range(self, text: str, start: int, end: int, registered: bool = False, kind: int = 59) -> None:
        what = {"textId": self.text(text)} if registered else {"text": text}
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=GLOBAL_TID, domainId=0, **what)

    def on_device(self, table: str, start: int, end: int, stream: int, correlation: int, **values: Any) -> None:
        place = {"deviceId": 0, "contextId": 1, "streamId": stream, "globalPid": GLOBAL_PID}
        self.add(table, start=start, end=end, correlationId=correlation, **place, **values)

    def kernel(self, which: int, start: int, end: int, stream: int, correlation: int) -> None:
        name, _, grid, block, registers = KERNELS[which]
        shape = dict(zip(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), (*grid, *block), strict=True))
        code = self.text(name)
        self.on_device(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start,
            end,
            stream,
            correlation,
            demangledName=code,
            shortName=code,
            registersPerThread=registers,
            staticSharedMemory=16,
            dynamicSharedMemory=8192 * (which == 4),
            **shape,
        )


def write_report(path: Path, schema: str = SCHEMA_2023, num_steps: int = 3, num_layers: int = 2) -> None:
    """Write the capture; `schema` is the tables' DDL."""
    report = Report(path, schema)
    meta = "META_DATA_EXPORT" if "META_DATA_EXPORT" in report.columns else "EXPORT_META_DATA"
    version = ("2023.4.4.54", "3.7.2") if meta == "META_DATA_EXPORT" else ("2022.4.2.50", "3.0.0")
    for name, value in zip(("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION"), version, strict=True):
        report.add(meta, name=name, value=value)
    for name, value in zip(("MAJOR", "MINOR", "MICRO"), version[1].split("."), strict=True):
        report.add(meta, name=f"EXPORT_SCHEMA_VERSION_{name}", value=value)
    if "META_DATA_CAPTURE" in report.columns:
        report.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value='HF_TOKEN="hf_secret"')
    secret = "SHELL=/bin/sh;HF_TOKEN=hf_secret"
    report.add("TARGET_INFO_SYSTEM_ENV", devStateName="", name="DeviceEnvironment", value=secret)
    limits = {"maxWarpsPerSm": 64, "maxBlocksPerSm": 32, "maxRegistersPerSm": 65536, "maxShmemPerSm": 233472}
    report.add("TARGET_INFO_GPU", id=0, name="NVIDIA H100 80GB HBM3", cuDevice=0, computeMajor=9, **limits)
    _fill(report, num_steps, num_layers)
    if "ENUM_CUDA_MEMCPY_OPER" in report.columns:
        for code, label in ((1, "Host-to-Device"), (2, "Device-to-Host"), (8, "Device-to-Device")):
            report.add("ENUM_CUDA_MEMCPY_OPER", id=code, name=label, label=label)
    report.database.commit()
    report.database.close()


def _fill(report: Report, num_steps: int, num_layers: int) -> None:
    host, correlation, free = 1_000_000, 100, {7: 0, 13: 0}

    def launch(which: int, stream: int) -> None:
        nonlocal host, correlation
        correlation += 1
        took = 4_100 + 37 * (correlation % 11)
        name = "cuLaunchKernelEx" if which == 1 else "cudaLaunchKernel_v7000"
        report.call(name, host, host + took, correlation)
        host += took + 500
        start = max(free[stream], host + 700 if correlation % 5 else host - 900)
        end = start + KERNELS[which][1] + 13 * (correlation % 17)
        report.kernel(which, start, end, stream, correlation)
        free[stream] = end

    def copy(name: str, table: str, took: int, **values: Any) -> None:
        nonlocal host, correlation
        correlation += 1
        report.call(name, host, host + 6_200, correlation)
        host += 6_500
        start = max(free[7], host)
        report.on_device(table, start, start + took, 7, correlation, **values)
        free[7] = start + took

    for step in range(num_steps):
        step_start = host
        host += 1_000
        copy("cudaMemcpyAsync_v3020", "CUPTI_ACTIVITY_KIND_MEMCPY", 1_900 + step, bytes=4096 * (step + 1), copyKind=1)
        copy("cudaMemsetAsync_v3020", "CUPTI_ACTIVITY_KIND_MEMSET", 900, bytes=65536)
        for layer in range(num_layers):
            start = host
            host += 100
            for which in ORDER:
                launch(which, 13 if which == 5 else 7)
            report.range(f"layer {layer}", start, host + 50, registered=layer == 0)
            host += 200
        copy("cudaMemcpyAsync_v3020", "CUPTI_ACTIVITY_KIND_MEMCPY", 1_400, bytes=512, copyKind=2)
        correlation += 1
        done = max(*free.values(), host) + 2_000
        report.call("cudaStreamSynchronize_v3020", host, done, correlation)
        host = done
        report.range("execute_step", step_start, host + 100, kind=60 if step == 0 else 59)
        host += 30_000


def whole_graphs(path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Add CUDA graphs that were recorded whole, as `--cuda-graph-trace=graph` does."""
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, "
            "graphId INTEGER, graphExecId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, "
            "globalPid INTEGER)"
        )
        for number, (start, end) in enumerate(spans):
            row = (start, end, 0, 5, 6, 1, 7, 9000 + number, GLOBAL_PID)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()


if __name__ == "__main__":
    write_report(Path(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8"))
