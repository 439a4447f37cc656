"""Every benchmark, one after the other."""

from __future__ import annotations

import attaching
import importing
import pages
import planning
import serving


def main() -> None:
    importing.main()
    planning.main()
    pages.main()
    attaching.main()
    serving.main()


if __name__ == "__main__":
    main()
