"""`python -m windtunnel` is the `windtunnel` command."""

from windtunnel.cli import main

if __name__ == "__main__":
    main()
