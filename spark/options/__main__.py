"""`python -m spark.options PROGRAM --help`: print a program's options without PySpark and Java."""

import sys

from spark.options import archive, reconcile, redact, restore

PARSERS = {
    "archive": archive.parser,
    "reconcile": reconcile.parser,
    "redact": redact.parser,
    "restore": restore.parser,
}


if __name__ == "__main__":
    PARSERS[sys.argv[1]]().parse_args(sys.argv[2:])
