"""schemathesis over /openapi.json against the real server: no 5xx, no hang.

    python fuzz_openapi.py --binary PATH/canopy-server --cases 200
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path


def schema(url, folder):
    """The served document; only the served model's name is a name worth sending."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        served = json.load(answer)["data"][0]["id"]
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    for body in document["components"]["schemas"].values():
        if "model" in body.get("properties", {}) and body.get("additionalProperties") is False:
            body["properties"]["model"] = {"enum": [None, served]}
    path = Path(folder) / "openapi.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the canopy-server to test")
    parser.add_argument("--cases", type=int, default=200, help="cases per operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", default="coverage,fuzzing")
    args = parser.parse_args()
    command = [args.binary, "--port", "0", "--log", "warn", "--context-len", "96", "--default-max-tokens", "8"]
    folder = tempfile.mkdtemp()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", server.stdout.readline()).group()
        tool = Path(sys.executable).parent / "schemathesis"
        fuzz = [
            tool, "run", schema(url, folder), "--url", url, "--checks", "not_a_server_error", "--mode", "all", "--phases", args.phases,
            "--max-examples", str(args.cases), "--request-timeout", "300", "--seed", str(args.seed), "--workers", "4", "--no-color",
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
