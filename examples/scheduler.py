"""A scheduler: make the pool that engines attach. Making it again finds the same pool."""

import json
import sys
from pathlib import Path

import kvpage

request = json.loads(Path(__file__).with_name("mimo.json").read_text())
try:
    with kvpage.Client() as client:
        pool = client.create_pool(request, device="host", name="mimo")
except kvpage.KvpageError as error:
    sys.exit(f"{error.code}: {error}")
print(f"{pool.name} is {pool.state} on {pool.device}: {pool.buffer_size_bytes} bytes, plan {pool.plan_id}")
