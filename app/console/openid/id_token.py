"""The checks of an ID token (OpenID Connect Core 1.0 §3.1.3.7): its signature by joserfc, its claims by Authlib."""

import warnings
from collections.abc import Mapping
from typing import Any

from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import BadSignatureError, JoseError, SecurityWarning
from joserfc.jwk import ECKey, OKPKey, RSAKey, import_key
from joserfc.jws import JWSRegistry, extract_compact

from app.console.openid.people import SUBJECT_MAX

# Difference of clocks that a token may show.
LEEWAY_S = 60
# Only signatures by a key pair. With others a token could be signed by nothing, or by a public key as a shared secret.
KINDS: dict[str, type[RSAKey | ECKey | OKPKey]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), RSAKey),
    **dict.fromkeys(("ES256", "ES384", "ES512"), ECKey),
    **dict.fromkeys(("EdDSA", "Ed25519"), OKPKey),
}
# The curves of the keys that sign by an algorithm.
CURVES = {
    "ES256": ("P-256",),
    "ES384": ("P-384",),
    "ES512": ("P-521",),
    "EdDSA": ("Ed25519", "Ed448"),
    "Ed25519": ("Ed25519",),
}
RSA_BITS_MIN = 2048
# Issuers may add header fields of their own; fields that must be understood (`crit`) are refused as ever.
_REGISTRY = JWSRegistry(algorithms=list(KINDS), strict_check_header=False)


class Untrusted(Exception):
    """The token is not one that the issuer made for this sign-in; the text says why."""


class UnknownKey(Untrusted):
    """None of the keys has signed the token: the issuer may have newer ones."""


def decoded(text: str, keys: list[dict[str, Any]]) -> jwt.Token:
    """Return the token, if one of the issuer's published keys has signed it. Raises Untrusted, UnknownKey."""
    try:
        header = extract_compact(text.encode("ascii")).headers()
    except (JoseError, ValueError, TypeError, AttributeError, RecursionError):
        raise Untrusted("it is not a signed token") from None
    algorithm, named = header.get("alg"), header.get("kid")
    kind = KINDS.get(algorithm) if isinstance(algorithm, str) else None
    if kind is None:
        raise Untrusted(f"it is signed by {str(algorithm)[:20]!r}, which is not accepted")
    for data in keys:
        fits = data.get("kid") in (None, named) if named is not None else True
        if not fits or data.get("alg", algorithm) != algorithm or data.get("kty") != kind.key_type:
            continue
        if data.get("crv") not in CURVES.get(str(algorithm), (data.get("crv"),)) or (key := _key(data)) is None:
            continue
        try:
            with warnings.catch_warnings():
                # EdDSA is the name of Ed25519 before RFC 9864.
                warnings.simplefilter("ignore", SecurityWarning)
                return jwt.decode(text, key, algorithms=[str(algorithm)], registry=_REGISTRY)
        except BadSignatureError:
            continue
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise Untrusted(_text(error)) from None
    raise UnknownKey("no key of the issuer has signed it")


def _key(data: dict[str, Any]) -> RSAKey | ECKey | OKPKey | None:
    """Return a published key; None if it cannot be used to verify, which does not concern the others (RFC 7517 §5)."""
    try:
        with warnings.catch_warnings():
            # Short keys are passed over here.
            warnings.simplefilter("ignore", SecurityWarning)
            key = import_key(data)
            key.check_key_op("verify")
    except (JoseError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(key, RSAKey | ECKey | OKPKey):
        return None
    return key if not isinstance(key, RSAKey) or key.raw_value.key_size >= RSA_BITS_MIN else None


def checked(
    token: jwt.Token, *, issuer: str, client_id: str, nonce: str, access_token: Any, now: float
) -> dict[str, Any]:
    """Return the claims of a decoded token, if it is for this client and this sign-in. Raises Untrusted."""
    options: Mapping[str, Any] = {
        "iss": {"essential": True, "value": issuer},
        "aud": {"essential": True, "value": client_id},
        "sub": {"essential": True},
    }
    claims = CodeIDToken(
        token.claims,
        token.header,
        options,
        {"nonce": nonce, "client_id": client_id, "access_token": access_token},
    )
    try:
        claims.validate(int(now), LEEWAY_S)
    except (JoseError, TypeError, ValueError, OverflowError) as error:
        raise Untrusted(_text(error)) from None
    if len(claims["sub"]) > SUBJECT_MAX:
        raise Untrusted(f"its `sub` is longer than {SUBJECT_MAX} characters")
    return dict(claims)


def _text(error: Exception) -> str:
    return (getattr(error, "description", "") or str(error) or type(error).__name__)[:200].rstrip(".")
