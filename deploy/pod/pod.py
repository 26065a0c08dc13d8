#!/usr/bin/env python3
"""A rented GPU for one sweep, with a hard budget: pod.py create | status | ssh-info | cost | watch | stop | terminate

Talks to RunPod's REST API. Environment:
  RUNPOD_API_KEY   the key; read from nowhere else, never printed, never sent to the pod
  POD_BUDGET_USD   hard budget of a pod, required by create and watch
  MAX_POD_HOURS    longest life, required by create and watch
  POD_GPU          GPU type (default "NVIDIA H200"); POD_IMAGE, POD_DISK_GB
  POD_API          another API address (tests)
The one pod lives in the file POD_STATE (default .pod.json beside this script); create refuses a second one.
"""
import datetime
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

STATE = Path(os.environ.get("POD_STATE", Path(__file__).with_name(".pod.json")))


class Refused(Exception):
    """Something that the caller has to mend."""


def setting(name, default=None, kind=str):
    text = os.environ.get(name, default)
    if text is None or text == "":
        raise Refused(f"{name} is not set")
    try:
        return kind(text)
    except ValueError:
        raise Refused(f"{name}: expected a number, got {text!r}") from None


def limits():
    budget, hours = setting("POD_BUDGET_USD", kind=float), setting("MAX_POD_HOURS", kind=float)
    if not (0 < budget < 1000 and 0 < hours <= 72):
        raise Refused(f"POD_BUDGET_USD must lie in (0, 1000) and MAX_POD_HOURS in (0, 72], got {budget} and {hours}")
    return budget, hours


def call(method, path, body=None):
    base = os.environ.get("POD_API", "https://rest.runpod.io/v1")
    request = urllib.request.Request(base + path, method=method, data=None if body is None else json.dumps(body).encode())
    request.add_header("authorization", f"Bearer {setting('RUNPOD_API_KEY')}")
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise Refused(f"{method} {path}: {error.code} {error.read().decode(errors='replace')[:300]}") from None
    except OSError as error:
        raise Refused(f"{method} {path}: {error}") from None
    return json.loads(text) if text.strip() else {}


def state():
    if not STATE.exists():
        raise Refused("there is no pod: create one")
    return json.loads(STATE.read_text())


def pod():
    return call("GET", f"/pods/{state()['id']}")


def seconds_up(info, now=None):
    """Since the pod's last start; since its creation where the API does not say."""
    started = info.get("lastStartedAt") or state()["created"]
    started = datetime.datetime.fromisoformat(started.replace(" UTC", "").replace(" +0000", "").replace("Z", "+00:00").strip())
    if started.tzinfo is None:
        started = started.replace(tzinfo=datetime.timezone.utc)
    now = now or datetime.datetime.now(datetime.timezone.utc)
    return max(0.0, (now - started).total_seconds())


def spent(info):
    return float(info.get("costPerHr") or state()["usd_per_hour"]) * seconds_up(info) / 3600


def create():
    budget, hours = limits()
    if STATE.exists():
        raise Refused(f"there is a pod already: {state()['id']}; terminate it first")
    made = call("POST", "/pods", {
        "name": "canopy-sweep",
        "imageName": setting("POD_IMAGE", "nvidia/cuda:13.0.2-devel-ubuntu24.04"),
        "gpuTypeIds": [setting("POD_GPU", "NVIDIA H200")],
        "gpuCount": 1,
        "containerDiskInGb": setting("POD_DISK_GB", "100", int),
        "ports": ["22/tcp"],
        "env": {"MAX_POD_HOURS": str(hours)},
    })
    price = float(made.get("costPerHr") or 0)
    created = datetime.datetime.now(datetime.timezone.utc).isoformat()
    # First of all the record: a pod without one would run on unseen.
    STATE.write_text(json.dumps({"id": made["id"], "created": created, "usd_per_hour": price}))
    if price <= 0 or price * hours > budget:
        call("DELETE", f"/pods/{made['id']}")
        STATE.unlink()
        raise Refused(f"{hours} hours at {price} USD an hour would pass the budget of {budget} USD: the pod is gone again")
    print(f"pod {made['id']}, {price:.2f} USD an hour, at most {hours:g} hours, {price * hours:.2f} of {budget:.2f} USD. Run `pod.py watch` now.")


def status():
    info = pod()
    print(f"pod {info['id']}: {info.get('desiredStatus', 'unknown')}, up {seconds_up(info) / 3600:.2f} h, {spent(info):.2f} USD")


def cost():
    print(f"{spent(pod()):.2f} USD")


def ssh_info():
    info = pod()
    port = (info.get("portMappings") or {}).get("22")
    if not info.get("publicIp") or not port:
        raise Refused("the pod has no address yet: wait a minute")
    print(f"ssh -p {port} root@{info['publicIp']}")


def stop():
    call("POST", f"/pods/{state()['id']}/stop")
    print("stopped: its disk still costs money; terminate ends that")


def terminate():
    call("DELETE", f"/pods/{state()['id']}")
    STATE.unlink()
    print("terminated")


def watch():
    """Until the pod has ended: terminates it when it is over its hours or its budget. An API that does not answer is asked again."""
    budget, hours = limits()
    every = setting("POD_WATCH_SECONDS", "60", float)
    while True:
        try:
            info = pod()
            used, up = spent(info), seconds_up(info) / 3600
            print(f"up {up:.2f} of {hours:g} h, {used:.2f} of {budget:.2f} USD", flush=True)
            if info.get("desiredStatus") in ("EXITED", "TERMINATED"):
                return
            if up >= hours or used >= budget:
                terminate()
                return
        except Refused as problem:
            if not STATE.exists():
                return
            if ": 404 " in str(problem):
                STATE.unlink()
                print("the pod is gone already")
                return
            print(f"watch: {problem}", file=sys.stderr, flush=True)
        time.sleep(every)


COMMANDS = {"create": create, "status": status, "ssh-info": ssh_info, "cost": cost, "watch": watch, "stop": stop, "terminate": terminate}


def main(arguments):
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        COMMANDS[arguments[0]]()
    except Refused as problem:
        print(f"pod.py {arguments[0]}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
