"""Run as a program: `kvpage serve` with limits that a test reaches at once. `tight_server.py LIMITS …`

LIMITS: fields of `IntakeLimits` as a JSON object; the rest are the arguments of `kvpage serve`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from kvpage_server.configured import from_command_line
from kvpage_server.intake import IntakeLimits
from kvpage_server.logs import configure_logging
from kvpage_server.serve import serve

if __name__ == "__main__":
    configure_logging("json", "info")
    limits = IntakeLimits(**json.loads(sys.argv[1]))
    serve(replace(from_command_line(sys.argv[2:], os.environ), intake=limits))
