"""schemathesis over /openapi.json against the real server: no 5xx, no hang.

    python fuzz_openapi.py --binary PATH/canopy-server --cases 200
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the canopy-server to test")
    parser.add_argument("--cases", type=int, default=200, help="cases per operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", default="coverage,fuzzing")
    args = parser.parse_args()
    command = [args.binary, "--port", "0", "--log", "warn", "--context-len", "96", "--default-max-tokens", "8"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", server.stdout.readline()).group()
        tool = Path(sys.executable).parent / "schemathesis"
        fuzz = [
            tool, "run", f"{url}/openapi.json", "--checks", "not_a_server_error", "--mode", "all", "--phases", args.phases,
            "--max-examples", str(args.cases), "--request-timeout", "30", "--seed", str(args.seed), "--workers", "4", "--no-color",
        ]
        outcome = subprocess.run(fuzz, timeout=1800)
        if outcome.returncode != 0:
            return outcome.returncode
        if server.poll() is not None:
            print("the server ended")
            return 1
        return 0
    finally:
        server.kill()


if __name__ == "__main__":
    sys.exit(main())
