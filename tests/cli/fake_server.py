"""A stand-in for a server: `fake_server.py PORT MODE`."""

import http.server
import json
import os
import signal
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        ok = self.path == "/health"
        self.send_response(200 if ok else 404)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/broken":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"bad request body")
            return
        self.send_response(200)
        self.end_headers()
        count = body["max_tokens"] - (1 if body["model"] == "short" else 0)
        for i in range(count):
            self.event({"choices": [{"delta": {"content": f"t{i} "}}]})
        if body["model"] == "error":
            self.event({"error": {"message": "engine died"}})
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        if body["model"] != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())


def child(*, ignore, session):
    """A grandchild that sleeps; it may ignore SIGTERM and may leave the process group."""
    code = "import signal, time\n"
    if ignore:
        code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "print('child', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=session, stdout=subprocess.PIPE
    )
    process.stdout.readline()


def main():
    port, mode = int(sys.argv[1]), sys.argv[2]
    print(f"fake server in mode {mode}, pid {os.getpid()}", flush=True)
    if mode == "dies":
        print("RuntimeError: no such model", flush=True)
        sys.exit(3)
    if mode == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child(ignore=True, session=False)
    if mode == "children":
        child(ignore=False, session=False)
        child(ignore=False, session=True)
    if mode == "orphans":
        child(ignore=False, session=False)
        child(ignore=True, session=True)
        sys.exit(4)
    if mode == "hangs":
        time.sleep(600)
    if mode == "dies-later":
        signal.signal(signal.SIGALRM, lambda *_: os._exit(5))
        signal.alarm(1)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
