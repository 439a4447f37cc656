"""Every benchmark, one after the other."""

from __future__ import annotations

import attaching
import importing
import leasing
import pages
import planning
import prefixes
import serving


def main() -> None:
    importing.main()
    planning.main()
    pages.main()
    prefixes.main()
    attaching.main()
    leasing.main()
    serving.main()


if __name__ == "__main__":
    main()
