// Runs oidc-provider with the configuration of the file that its argument names. People sign in by their names, with any
// password, on the forms that it has for development.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const library = `${process.env.HALFNOTE_TEST_PROVIDER}/node_modules/oidc-provider/lib/index.js`;
const { default: Provider } = await import(pathToFileURL(library).href);
const given = JSON.parse(readFileSync(process.argv[2], "utf8"));

const provider = new Provider(given.issuer, {
  clients: [{
    client_id: "halfnote",
    client_secret: "shared between both",
    redirect_uris: [given.redirect_uri],
    ...given.client,
  }],
  claims: { openid: ["sub"], email: ["email", "email_verified"], groups: ["groups"] },
  conformIdTokenClaims: given.conform,
  cookies: { keys: ["only for a test"] },
  jwks: given.jwks,
  ttl: { AccessToken: 600, AuthorizationCode: 60, IdToken: 600, Grant: 600, Interaction: 600, Session: 600 },
  pkce: { required: () => true },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, ...given.people[id] }) }),
});
provider.listen(given.port, "127.0.0.1");
