#!/usr/bin/env python3
"""Compiles every CUDA kernel for every listed architecture and records what ptxas says: registers, shared memory, stack, spills, and the
threads of its launch bounds.

    python3 tools/kernel_resources.py            compares with canopy-kernels/resources.tsv, exit code 1 on a difference
    python3 tools/kernel_resources.py --write    writes the record anew

Needs nvcc (tools/cuda-toolkit.sh).
"""

import concurrent.futures
import difflib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

CRATE = pathlib.Path(__file__).resolve().parent.parent / "canopy-kernels"
RECORD = CRATE / "resources.tsv"
ARCHS = (80, 86, 89, 90, 120, 121)
HEADER = "kernel\tsm\tregisters\tstatic_shared\tstack\tspill_stores\tspill_loads\tthreads"


def hopper_only(source):
    return source.stem.endswith("_sm90a")


def launch_bounds(cubin):
    """Most threads of a CTA by entry point."""
    dump = subprocess.run(["cuobjdump", "-elf", cubin], capture_output=True, text=True, check=True).stdout
    threads, kernel = {}, None
    for line in dump.splitlines():
        if line.startswith(".nv.info."):
            kernel = line.removeprefix(".nv.info.").strip()
        elif "EIATTR_" in line:
            bounds = "EIATTR_MAX_THREADS" in line
        elif "Value:" in line and kernel and bounds:
            sizes = [int(size, 16) for size in line.split("Value:")[1].split()]
            threads[kernel] = sizes[0] * sizes[1] * sizes[2]
    return threads


def rows(source, arch):
    with tempfile.TemporaryDirectory() as folder:
        target = f"{arch}a" if hopper_only(source) else arch
        cubin = os.path.join(folder, "out.cubin")
        command = ["nvcc", "-cubin", "-std=c++17", "-O3", "-Iinclude", "-Xptxas", "-v",
                   f"-gencode=arch=compute_{target},code=sm_{target}", "-o", cubin, str(source)]
        run = subprocess.run(command, cwd=CRATE, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{source} for sm_{arch}:\n{run.stderr}")
        threads = launch_bounds(cubin)
    found = []
    for part in run.stderr.split("Compiling entry function '")[1:]:
        number = lambda pattern: int((re.search(pattern, part) or [0, 0])[1])
        kernel = part.split("'")[0]
        found.append("\t".join(map(str, (kernel, arch, number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"),
                                         number(r"(\d+) bytes stack"), number(r"(\d+) bytes spill stores"),
                                         number(r"(\d+) bytes spill loads"), threads.get(kernel, 0)))))
    return found


def main():
    sources = sorted(CRATE.glob("src/*/*.cu"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(lambda job: rows(*job), [(source, arch) for source in sources for arch in ARCHS
                                                    if arch == 90 or not hopper_only(source)])
        lines = [HEADER, *sorted(row for part in parts for row in part)]
    if "--write" in sys.argv:
        RECORD.write_text("\n".join(lines) + "\n")
        return
    difference = list(difflib.unified_diff(RECORD.read_text().splitlines(), lines, str(RECORD.name), "now", lineterm="", n=0))
    if difference:
        sys.exit("\n".join(difference) + "\nthe kernels' resources differ from the record: look, then write it anew with --write")
    spilling = sum(line.split("\t")[5] != "0" for line in lines[1:])
    print(f"{len(lines) - 1} kernel images as recorded, {spilling} of them with spills")


if __name__ == "__main__":
    main()
