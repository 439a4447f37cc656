"""The process of one check: `python -m gpu_checks.child EVENTS MODULE:FUNCTION DEVICE_UUID`."""

from __future__ import annotations

import importlib
import sys
import traceback

from gpu_checks.trial import Failed, Skip, Trial


def main(arguments: list[str]) -> int:
    path, function, device_uuid = arguments
    module, name = function.split(":")
    with open(path, "a", encoding="utf-8") as events:
        trial = Trial(device_uuid, events)
        try:
            getattr(importlib.import_module(module), name)(trial)
        except Skip as reason:
            trial.verdict("skip", str(reason))
        except Failed as reason:
            trial.verdict("fail", str(reason))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this check's result
            traceback.print_exc()
            trial.verdict("fail", f"{type(error).__name__}: {error}")
        else:
            trial.verdict("pass")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
