"""The programs for spark-submit or `python -m`: one module each, with `main(argv) -> exit status`."""
