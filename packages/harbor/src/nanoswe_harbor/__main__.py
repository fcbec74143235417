"""`python -m nanoswe_harbor`: the command line."""

from nanoswe_harbor.cli import main

if __name__ == "__main__":
    main()
