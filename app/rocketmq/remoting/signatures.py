"""Whose request it is, by the signature over all its fields and its body."""

from base64 import b64decode
from binascii import Error as NotBase64

from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.remoting.frames import RemotingFrame

ACCESS_KEY, SIGNATURE = "AccessKey", "Signature"


def keys_of_request(request: RemotingFrame, credentials: Credentials) -> ApiKeys:
    """Return the API keys of a request. Raises CallRefused (UNAUTHORIZED)."""
    # Java sorts by UTF-16 units; the names of fields are ASCII.
    signed = "".join(value for name, value in sorted(request.fields.items()) if name != SIGNATURE)
    try:
        signature = b64decode(request.fields.get(SIGNATURE, ""), validate=True)
    except (NotBase64, ValueError):
        signature = b""
    return credentials.keys_of_signed(request.fields.get(ACCESS_KEY), signed.encode() + request.body, signature)
