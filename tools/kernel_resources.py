#!/usr/bin/env python3
"""Compiles every CUDA kernel for every listed architecture and records what ptxas says: registers, shared memory, stack, spills.

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
HEADER = "kernel\tsm\tregisters\tstatic_shared\tstack\tspill_stores\tspill_loads"


def hopper_only(source):
    return source.stem.endswith("_sm90a")


def rows(source, arch):
    with tempfile.TemporaryDirectory() as folder:
        target = f"{arch}a" if hopper_only(source) else arch
        command = ["nvcc", "-cubin", "-std=c++17", "-O3", "-Iinclude", "-Xptxas", "-v",
                   f"-gencode=arch=compute_{target},code=sm_{target}",
                   "-o", os.path.join(folder, "out.cubin"), str(source)]
        run = subprocess.run(command, cwd=CRATE, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{source} for sm_{arch}:\n{run.stderr}")
    found = []
    for part in run.stderr.split("Compiling entry function '")[1:]:
        number = lambda pattern: int((re.search(pattern, part) or [0, 0])[1])
        found.append("\t".join(map(str, (part.split("'")[0], arch, number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"),
                                         number(r"(\d+) bytes stack"), number(r"(\d+) bytes spill stores"),
                                         number(r"(\d+) bytes spill loads")))))
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
