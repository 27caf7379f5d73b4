"""healthcheck.py [PORT]: exit code 0 when the server answers /health, for HEALTHCHECK."""

from __future__ import annotations

import sys
import urllib.request

PORT = 8000
SECONDS = 5


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS) as answer:
            return answer.status == 200
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not healthy(int(sys.argv[1]) if len(sys.argv) > 1 else PORT))
