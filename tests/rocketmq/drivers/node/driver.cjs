// Apache's client for Node: producer, transactions with a checker, a simple consumer, and two push consumers.
//
// Arguments: endpoint, topic, consumer group, access key, secret, and the seconds for which it stays. The group `…-fifo`
// is ordered. It prints what happens as lines of JSON, and ends that many seconds after the consumers have everything
// that is to come. NODE_PATH names the folder of the client.
const { Producer, PushConsumer, SimpleConsumer, ConsumeResult } = require('rocketmq-client-nodejs');
const { TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb.js');

const [ endpoints, topic, group, accessKey, accessSecret, staysS ] = process.argv.slice(2);
const sessionCredentials = accessKey ? { accessKey, accessSecret } : undefined;
const IN_ORDER = [ 'fifo-0', 'fifo-1', 'fifo-2' ];
const DONE = [ 'commit', 'orphan-commit', 'orphan-unknown', 'plain', 'delay', ...IN_ORDER ];
const POISON_ATTEMPTS = 2;
const failed = { pushed: 0, ordered: 0 };
const pushed = new Set();
const ordered = new Set();
const asked = new Set();
const seen = new Set();

const say = (what, fields = {}) => process.stdout.write(`${JSON.stringify({ what, ...fields })}\n`);
// The ordered consumer of this client tries a message that failed no second time.
const hasAll = () => [ ...DONE, 'poison' ].every(body => seen.has(body)) && DONE.every(body => pushed.has(body))
  && IN_ORDER.every(body => ordered.has(body) || asked.has(body)) && failed.ordered > 0
  && failed.pushed >= POISON_ATTEMPTS;
const logger = { info() {}, debug() {}, warn() {}, error(...said) { process.stderr.write(`${said.join(' ')}\n`); }, child() { return logger; } };
const common = { endpoints, namespace: '', sessionCredentials, sslEnabled: false, logger };

async function check(view) {
  const body = view.body.toString();
  say('checked', { body, message_id: `${view.messageId}`, properties: Object.fromEntries(view.properties) });
  if (body === 'orphan-unknown' && !asked.has(body)) {
    asked.add(body);
    return TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED;
  }
  return body.endsWith('rollback') ? TransactionResolution.ROLLBACK : TransactionResolution.COMMIT;
}

async function consume(view) {
  const body = view.body.toString();
  say('pushed', { body, attempt: view.deliveryAttempt });
  if (body === 'poison') {
    failed.pushed++;
    return ConsumeResult.FAILURE;
  }
  if (body === 'plain' && view.deliveryAttempt === 1) return ConsumeResult.FAILURE;
  pushed.add(body);
  return ConsumeResult.SUCCESS;
}

async function consumeInOrder(view) {
  const body = view.body.toString();
  say('ordered', { body });
  if (body === 'poison') {
    failed.ordered++;
    return ConsumeResult.FAILURE;
  }
  if (body === 'fifo-1' && !asked.has(body)) {
    asked.add(body);
    return ConsumeResult.FAILURE;
  }
  ordered.add(body);
  return ConsumeResult.SUCCESS;
}

(async () => {
  const simple = new SimpleConsumer({
    ...common, consumerGroup: group, subscriptions: new Map([[ topic, '*' ]]), awaitDuration: 5000,
  });
  await simple.startup();
  for (const [ name, listener ] of [[ '-push', consume ], [ '-fifo', consumeInOrder ]]) {
    const push = new PushConsumer({
      ...common, consumerGroup: `${group}${name}`, subscriptions: new Map([[ topic, '*' ]]),
      messageListener: { consume: listener },
    });
    await push.startup();
  }
  const producer = new Producer({ ...common, topic, topics: [ topic ], checker: { check } });
  await producer.startup();
  say('started');

  const transaction = async body => {
    const begun = producer.beginTransaction();
    const message = { topic, tag: 'created', body: Buffer.from(body), properties: new Map([[ 'shop', 's1' ]]) };
    say('sent', { body, message_id: `${(await producer.send(message, begun)).messageId}` });
    return begun;
  };
  const send = async message => {
    const receipt = await producer.send({ topic, ...message });
    say('sent', { body: message.body.toString(), message_id: `${receipt.messageId}` });
  };
  await (await transaction('commit')).commit();
  await (await transaction('rollback')).rollback();
  for (const orphan of [ 'orphan-commit', 'orphan-rollback', 'orphan-unknown' ]) await transaction(orphan);
  await send({ body: Buffer.from('plain'), tag: 'created', keys: [ 'k1', 'k2' ], properties: new Map([[ 'shop', 's1' ]]) });
  for (const body of IN_ORDER) await send({ body: Buffer.from(body), messageGroup: 'g1' });
  await send({ body: Buffer.from('poison'), messageGroup: 'g2' });
  await send({ body: Buffer.from('delay'), deliveryTimestamp: new Date(Date.now() + 2000) });

  const end = Date.now() + 90000;
  while (Date.now() < end && !hasAll()) {
    for (const one of await simple.receive(16, 30000)) {
      const body = one.body.toString();
      say('received', {
        body, tag: one.tag, keys: one.keys, properties: Object.fromEntries(one.properties), message_id: `${one.messageId}`,
        attempt: one.deliveryAttempt, group: one.messageGroup, corrupted: one.corrupted,
      });
      await simple.ack(one);
      seen.add(body);
    }
  }
  await new Promise(stayed => setTimeout(stayed, 1000 * staysS));
  say('done');
  process.exit(0);
})().catch(error => {
  say('failed', { error: `${error.stack}` });
  process.exit(1);
});
