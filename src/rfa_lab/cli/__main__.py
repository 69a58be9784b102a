"""`python -m rfa_lab.cli`, for launchers that start modules. Python requires this file."""

from . import main

if __name__ == "__main__":
    main()
