"""Whom the client trusts when Halfnote's URL begins with `https:`."""

import os
import ssl

import httpx

CA_FILE = "HALFNOTE_CA_FILE"


def trusted(url: str) -> ssl.SSLContext | bool:
    """Return the context for connections to a URL: public CAs, and those in the file that HALFNOTE_CA_FILE names.

    SSL_CERT_FILE and SSL_CERT_DIR replace the public CAs. Raises ValueError if the file is unusable.
    """
    if not url.lower().startswith("https:"):
        # Reading the CAs takes a while.
        return True
    context = httpx.create_ssl_context()
    if file := os.environ.get(CA_FILE):
        try:
            context.load_verify_locations(file)
        except OSError as error:
            raise ValueError(f"{CA_FILE}: {file} is no readable PEM file of CAs: {error.strerror or error}") from None
    return context
