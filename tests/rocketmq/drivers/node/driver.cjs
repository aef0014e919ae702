// Apache's client for Node: producer, transactions with a checker, a simple and a push consumer.
//
// Arguments: endpoint, topic, consumer group, access key, secret. It prints what happens as lines of JSON, and ends when
// the consumers have everything that is to come. NODE_PATH names the folder of the client.
const { Producer, PushConsumer, SimpleConsumer, ConsumeResult } = require('rocketmq-client-nodejs');
const { TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb.js');

const [ endpoints, topic, group, accessKey, accessSecret ] = process.argv.slice(2);
const sessionCredentials = accessKey ? { accessKey, accessSecret } : undefined;
const EXPECTED = [ 'commit', 'orphan-commit', 'orphan-unknown', 'plain', 'fifo', 'delay' ];
const pushed = new Set();
const asked = new Set();
const seen = new Set();

const say = (what, fields = {}) => process.stdout.write(`${JSON.stringify({ what, ...fields })}\n`);
const all = found => EXPECTED.every(body => found.has(body));
const logger = { info() {}, debug() {}, warn() {}, error(...said) { process.stderr.write(`${said.join(' ')}\n`); }, child() { return logger; } };
const common = { endpoints, namespace: '', sessionCredentials, sslEnabled: false, logger };

async function check(view) {
  const body = view.body.toString();
  say('checked', { body, message_id: `${view.messageId}`, properties: Object.fromEntries(view.properties) });
  if (body === 'orphan-unknown' && !asked.has(body)) {
    asked.add(body);
    return TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED;
  }
  return body === 'orphan-rollback' ? TransactionResolution.ROLLBACK : TransactionResolution.COMMIT;
}

async function consume(view) {
  const body = view.body.toString();
  say('pushed', { body, attempt: view.deliveryAttempt });
  if (body === 'plain' && view.deliveryAttempt === 1) return ConsumeResult.FAILURE;
  pushed.add(body);
  return ConsumeResult.SUCCESS;
}

(async () => {
  const simple = new SimpleConsumer({
    ...common, consumerGroup: group, subscriptions: new Map([[ topic, '*' ]]), awaitDuration: 5000,
  });
  await simple.startup();
  const push = new PushConsumer({
    ...common, consumerGroup: `${group}-push`, subscriptions: new Map([[ topic, '*' ]]), messageListener: { consume },
  });
  await push.startup();
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
  await send({ body: Buffer.from('fifo'), messageGroup: 'g1' });
  await send({ body: Buffer.from('delay'), deliveryTimestamp: new Date(Date.now() + 2000) });

  const end = Date.now() + 90000;
  while (Date.now() < end && !(all(seen) && all(pushed))) {
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
  say('done');
  process.exit(0);
})().catch(error => {
  say('failed', { error: `${error.stack}` });
  process.exit(1);
});
