"""Write the options that the chart accepts as `settings` into the chart's schema, with types and limits."""

import json
from pathlib import Path
from typing import Any

from app.config import Settings

SCHEMA = Path(__file__).parent.parent / "helm" / "halfnote" / "values.schema.json"
# Options that the chart sets from its own values, and options of the embedded Postgres only.
OWNED = {
    "accept",
    "admin_key_file",
    "archive",
    "archive_bodies",
    "archive_keep_s",
    "auth",
    "data_dir",
    "database_url",
    "database_url_file",
    "drain_s",
    "host",
    "port",
    "role",
    "secrets_key_file",
    "tls_cert",
    "tls_key",
    "workers",
}


def settings_schema() -> dict[str, Any]:
    """Return the schema of `settings`, without secrets, because the chart's values are not secret."""
    options = Settings.model_json_schema()["properties"]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: _without_titles(option)
            for name, option in sorted(options.items())
            if name not in OWNED and "writeOnly" not in json.dumps(option)
        },
    }


def _without_titles(option: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in option.items() if key not in ("title", "default", "format")}


def schema() -> str:
    """Return the chart's schema with this version's options."""
    whole = json.loads(SCHEMA.read_text())
    whole["properties"]["settings"] = settings_schema()
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema())
