"""Sign-in of people by OpenID Connect: the issuer, the checks of its tokens, and the roles of its people."""
