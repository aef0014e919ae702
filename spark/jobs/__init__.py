"""What runs by spark-submit or `python -m`: one module a program, each with `main(argv) -> exit status`."""
