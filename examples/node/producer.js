// A shop in Node that announces exactly the orders that it commits; docs/protocol.md explains it.
import { randomBytes } from "node:crypto";
import { createServer } from "node:http";
import pg from "pg";
import { Webhook, WebhookVerificationError } from "standardwebhooks";

const { HALFNOTE_URL, DATABASE_URL, CHECK_SECRET, PORT } = process.env;
const pool = new pg.Pool({ connectionString: DATABASE_URL, max: 20 });
pool.on("error", console.warn);
const webhook = new Webhook(CHECK_SECRET);

function newId() { // a UUIDv7
  const bytes = randomBytes(16);
  bytes.writeUIntBE(Date.now(), 0, 6);
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return bytes.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

async function post(path, content) {
  const headers = { "content-type": "application/json" };
  const signal = AbortSignal.timeout(5000);
  const answer = await fetch(HALFNOTE_URL + path, { method: "POST", headers, body: JSON.stringify(content), signal });
  if (!answer.ok) throw new Error(await answer.text());
}

async function inTransaction(work) {
  const connection = await pool.connect();
  let failure;
  try {
    await connection.query("begin");
    const result = await work(connection);
    await connection.query("commit");
    return result;
  } catch (error) {
    throw (failure = error);
  } finally {
    connection.release(failure); // a connection that failed is closed, which rolls back
  }
}

async function place(number) {
  const half = { producer_group: "shop", transaction_id: newId() };
  const message = { topic: "order", key: `order-${number}`, body: { order: number } };
  await post("/half", { ...half, messages: [message] });
  let verdict = "commit";
  try {
    await inTransaction(async (connection) => {
      // This insert fails if a check came first.
      await connection.query("insert into halfnote_barrier values ($1, 'local')", [half.transaction_id]);
      await connection.query("insert into orders values ($1)", [number]);
    });
  } catch (error) {
    console.warn(error);
    verdict = await ask(half.transaction_id); // the barrier has the outcome, even of a commit whose answer was lost
  }
  await post("/end", { ...half, verdict }).catch(console.warn); // if it fails, Halfnote sends a check
  return `${half.transaction_id} ${verdict}`;
}

const ask = (id) => inTransaction(async (connection) => {
  await connection.query("set local lock_timeout = '3s'"); // how long to wait for a local transaction that is open
  await connection.query("insert into halfnote_barrier values ($1, 'rollback') on conflict do nothing", [id]);
  const found = await connection.query("select reason from halfnote_barrier where transaction_id = $1", [id]);
  return found.rows[0].reason === "local" ? "commit" : "rollback";
});

async function answered({ url, headers }, body) {
  if (url.startsWith("/orders/")) return place(Number(url.slice("/orders/".length)));
  const { type, transaction_id } = webhook.verify(body, headers);
  return type === "halfnote.check" ? JSON.stringify({ verdict: await ask(transaction_id) }) : "";
}

createServer(async (request, response) => {
  const body = Buffer.concat(await request.toArray());
  answered(request, body).then((text) => response.end(text), (error) => {
    response.writeHead(error instanceof WebhookVerificationError ? 401 : 500).end(String(error));
  });
}).listen(PORT, "127.0.0.1");
