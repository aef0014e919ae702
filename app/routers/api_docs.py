"""`/docs`: every call of the API, to try in a browser. Its files are in the package, so it works offline."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

# The files are those of the console (app/console/static/).
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Halfnote: every call</title>
<link rel="icon" href="/console/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/console/static/swagger-ui.css">
<script src="/console/static/swagger-ui-bundle.js" defer></script>
<script src="/console/static/api-docs.js" defer></script>
</head>
<body><div id="swagger-ui"></div></body>
</html>
"""
# Swagger UI sets styles of elements and has its icons as data.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)


@router.get("/docs", include_in_schema=False)
async def get_docs() -> HTMLResponse:
    """Show every call of the API."""
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY, "x-content-type-options": "nosniff"})
