"""`python -m app.cli`, where the `halfnote` command is not on the path."""

from app.cli import main

if __name__ == "__main__":
    main()
