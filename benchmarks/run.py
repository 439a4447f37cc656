"""Every benchmark, one after the other."""

from __future__ import annotations

import attaching
import importing
import planning


def main() -> None:
    importing.main()
    planning.main()
    attaching.main()


if __name__ == "__main__":
    main()
