"""pod.py against a local fake of the API: python3 deploy/pod/test_pod.py. No rented machine is touched."""
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

SCRIPT = Path(__file__).with_name("pod.py")


class Fake(BaseHTTPRequestHandler):
    """Pods in a dictionary, and what was asked."""
    pods, asked, price, fail_next = {}, [], 4.0, 0

    def answer(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if body is not None else b"")

    def handle_any(self):
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        Fake.asked.append((self.command, self.path, body))
        if self.headers.get("authorization") != "Bearer secret-key":
            return self.answer(401, {"error": "unauthorized"})
        if Fake.fail_next > 0:
            Fake.fail_next -= 1
            return self.answer(502, {"error": "bad gateway"})
        if (self.command, self.path) == ("POST", "/pods"):
            now = datetime.datetime.now(datetime.timezone.utc).isoformat()
            made = {"id": "p1", "costPerHr": Fake.price, "desiredStatus": "RUNNING", "lastStartedAt": now, "publicIp": "", "portMappings": None}
            Fake.pods["p1"] = made
            return self.answer(201, made)
        name = self.path.split("/")[2]
        if name not in Fake.pods:
            return self.answer(404, {"error": "pod not found"})
        if self.command == "DELETE":
            del Fake.pods[name]
            return self.answer(204, None)
        if self.path.endswith("/stop"):
            Fake.pods[name]["desiredStatus"] = "EXITED"
        return self.answer(200, Fake.pods[name])

    do_GET = do_POST = do_DELETE = handle_any

    def log_message(self, *_):
        pass


class PodTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = HTTPServer(("127.0.0.1", 0), Fake)
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()

    @classmethod
    def tearDownClass(cls):
        cls.server.shutdown()
        cls.server.server_close()

    def setUp(self):
        Fake.pods, Fake.asked, Fake.price, Fake.fail_next = {}, [], 4.0, 0
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.state = Path(self.folder.name, "pod.json")

    def run_pod(self, *arguments, **changes):
        environment = {
            "PATH": os.environ["PATH"], "RUNPOD_API_KEY": "secret-key", "POD_BUDGET_USD": "10", "MAX_POD_HOURS": "2",
            "POD_API": f"http://127.0.0.1:{self.server.server_port}", "POD_STATE": str(self.state), "POD_WATCH_SECONDS": "0.05", **changes,
        }
        environment = {name: value for name, value in environment.items() if value is not None}
        done = subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=300)
        self.assertNotIn("secret-key", done.stdout + done.stderr)
        return done

    def age(self, hours):
        started = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=hours)
        Fake.pods["p1"]["lastStartedAt"] = started.isoformat()
        return started

    def assert_cost(self, started, price):
        """`cost` tells the price of the hours from `started` to some moment of its run, to the cent."""
        def dollars():
            return price * (datetime.datetime.now(datetime.timezone.utc) - started).total_seconds() / 3600
        low, done, high = dollars(), self.run_pod("cost"), dollars()
        cost = float(re.fullmatch(r"(\d+\.\d\d) USD\n", done.stdout).group(1))
        self.assertTrue(low - 0.006 <= cost <= high + 0.006, f"{done.stdout}: expected {low} to {high}")

    def test_a_pods_life(self):
        self.assertEqual(self.run_pod("create").returncode, 0)
        body = Fake.asked[0][2]
        self.assertEqual(body["gpuTypeIds"], ["NVIDIA H200"])
        self.assertNotIn("secret-key", json.dumps(body))
        self.assertIn("RUNNING", self.run_pod("status").stdout)
        self.assertIn("no address yet", self.run_pod("ssh-info").stderr)
        Fake.pods["p1"].update(publicIp="192.0.2.7", portMappings={"22": 10022})
        self.assertEqual(self.run_pod("ssh-info").stdout, "ssh -p 10022 root@192.0.2.7\n")
        started = self.age(1.5)
        self.assert_cost(started, 4.0)
        # As the API writes them: the price as text, the time with a Z.
        Fake.pods["p1"].update(costPerHr="4.00", lastStartedAt=started.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z")
        self.assert_cost(started, 4.0)
        self.assertEqual(self.run_pod("stop").returncode, 0)
        self.assertIn("EXITED", self.run_pod("status").stdout)
        self.assertEqual(self.run_pod("terminate").returncode, 0)
        self.assertEqual((Fake.pods, self.state.exists()), ({}, False))

    def test_create_refuses_without_limits_a_key_or_a_second_time(self):
        for name in ("POD_BUDGET_USD", "MAX_POD_HOURS", "RUNPOD_API_KEY"):
            done = self.run_pod("create", **{name: None})
            self.assertEqual((done.returncode, Fake.pods), (1, {}), name)
            self.assertIn(f"{name} is not set", done.stderr)
        self.assertIn("expected a number", self.run_pod("create", MAX_POD_HOURS="soon").stderr)
        self.assertIn("MAX_POD_HOURS in (0, 72]", self.run_pod("create", MAX_POD_HOURS="100").stderr)
        self.run_pod("create")
        self.assertIn("there is a pod already: p1", self.run_pod("create").stderr)
        self.assertEqual(len([one for one in Fake.asked if one[:2] == ("POST", "/pods")]), 1)

    def test_a_pod_over_the_budget_is_gone_at_once(self):
        Fake.price = 6.0
        done = self.run_pod("create")
        self.assertEqual((done.returncode, Fake.pods, self.state.exists()), (1, {}, False))
        self.assertIn("would pass the budget of 10.0 USD", done.stderr)

    def test_watch_ends_a_pod_over_its_hours_and_over_its_budget(self):
        for hours, changes in ((2.1, {}), (1.0, {"POD_BUDGET_USD": "3.5"})):
            self.run_pod("create")
            self.age(hours)
            done = self.run_pod("watch", **changes)
            self.assertEqual((done.returncode, Fake.pods, self.state.exists()), (0, {}, False))

    def test_watch_asks_again_when_the_api_fails(self):
        self.run_pod("create")
        self.age(3)
        Fake.fail_next = 3
        done = self.run_pod("watch")
        self.assertEqual(Fake.pods, {})
        self.assertEqual(done.stderr.count("502"), 3)

    def test_watch_ends_when_the_pod_is_gone_already(self):
        self.run_pod("create")
        Fake.pods.clear()
        self.assertEqual((self.run_pod("watch").returncode, self.state.exists()), (0, False))

    def test_what_there_is_no_pod_for(self):
        for command in ("status", "cost", "ssh-info", "stop", "terminate"):
            self.assertIn("there is no pod", self.run_pod(command).stderr)
        self.assertEqual(self.run_pod("launch").returncode, 2)


if __name__ == "__main__":
    unittest.main()
