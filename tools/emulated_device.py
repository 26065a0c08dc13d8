#!/usr/bin/env python3
"""Builds a libcuda.so.1 that runs canopy-kernels' CUDA sources on the CPU, and prints its folder.

  LD_LIBRARY_PATH=$(python3 tools/emulated_device.py --out target/emulated) cargo test -p canopy-kernels --features cuda --test gpu

Every src/<room>/*.cu but those for Hopper's own instructions (`*_sm90a.cu`) is compiled by g++ with the headers in canopy-kernels/emulation, which
also says what the emulation checks. A source is compiled anew when it, a header or the emulation changed. The kernels hold the
contract's faults (include/canopy/fault.cuh), so that the contract runs with its controls:

  LD_LIBRARY_PATH=... cargo test -p canopy-kernels --features controls --test contract_cuda
"""
import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import subprocess
import sys

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "canopy-kernels"
FLAGS = ["-std=c++20", "-O3", "-march=x86-64-v3", "-fno-math-errno", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-extern-tls-init", "-Wno-attributes", "-Wno-unknown-pragmas"]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def shared_memory(text):
    """The definition of what a source declares as `extern __shared__`, and the function that tells where it is."""
    scopes = []
    token = r"namespace\s+(?P<name>\w+)\s*\{|(?P<other>[{}])|extern\s+thread_local\s+(?:__attribute__\(\(aligned\(\d+\)\)\)\s+)?(?P<type>\w+)\s+(?P<buffer>\w+)\[\]"
    for found in re.finditer(token, text):
        if found["type"]:
            space = next((scope for scope in scopes if scope), None)
            define = f"CANOPY_SHARED({found['type']}, {found['buffer']})"
            return (f"namespace {space} {{ {define} }}", f"{space}::shared_of_block") if space else (define, "shared_of_block")
        if found["other"] == "}":
            scopes.pop()
        else:
            scopes.append(found["name"])
    return ("", "nullptr")


def compiled(source, includes, out):
    """The object of one source; of a CUDA source with its kernels and its shared memory listed."""
    device = source.suffix == ".cu"
    name = f"{source.parent.name}_{source.stem}" if device else source.stem
    # rooms have functions of one name, which one library may not hold
    flags = [*FLAGS, *includes, *(["-include", "device.h", "-DCANOPY_EMULATED", f"-Dcanopy=canopy_{name}", f"-Dcanopy_fault=canopy_fault_{name}"] if device else [])]
    text = run(["g++", *flags, "-DCANOPY_LIST", "-E", "-P", "-x", "c++", source])
    stamp, built, unit = out / f"{name}.hash", out / f"{name}.o", out / f"{name}.cpp"
    digest = hashlib.sha256((" ".join(flags) + text).encode()).hexdigest()
    if not (built.exists() and stamp.exists() and stamp.read_text() == digest):
        lines = [f'#include "{source}"']
        if device:
            lines.insert(0, '#include "kernels.h"')
            buffer = shared_memory(text)
            lines += buffer[:1]
            fault = f"canopy_fault_{name}"
            planted = f"int {fault} " in text
            lines += [f"CANOPY_PLANTED({fault})"] * planted
            fault = f"{fault}_of_thread" if planted else "nullptr"
            entries = dict.fromkeys(re.findall(r"\bCANOPY_KERNEL\s+void\s+(\w+)\s*\(", text))
            lines += [f"CANOPY_LISTED({entry}, {buffer[1]}, {fault})" for entry in entries]
        unit.write_text("\n".join(lines) + "\n")
        run(["g++", *flags, "-c", unit, "-o", built])
        stamp.write_text(digest)
    return built


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", required=True, help="folder for objects and the library")
    ap.add_argument("--jobs", type=int, default=os.cpu_count())
    args = ap.parse_args()
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    home = KERNELS / "emulation"
    includes = [f"-I{home / 'include'}", f"-I{home}", f"-I{KERNELS / 'include'}"]
    sources = [s for s in sorted(KERNELS.glob("src/*/*.cu")) if not s.stem.endswith("_sm90a")] + sorted(home.glob("*.cpp"))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        objects = list(pool.map(lambda source: compiled(source, includes, out), sources))
    run(["g++", "-shared", "-o", out / "libcuda.so.1", *objects])
    print(out)


if __name__ == "__main__":
    main()
