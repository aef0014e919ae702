import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Scanner;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Apache's remoting client: a transaction producer with its listener, and push consumers, concurrent and orderly.
 *
 * <p>Arguments: what to do, address, topic, producer group, consumer group, access key, secret. `scenario` sends
 * everything and ends when the consumers have what is to come. `orphan` sends a transaction, says nothing of its end,
 * and dies. `answer` answers checks until one came. `hold` sends a transaction, says nothing of its end, and answers a
 * check when it reads a line. `consume` and `order` consume until they are killed, `order` in order. `send` sends the
 * bodies that follow; a body `key:number` has that key. The Java property `namespace` is that of all names, `heartbeat`
 * the time between a consumer's heartbeats in milliseconds. It prints what happens as lines of JSON.
 */
public class RemotingDriver {
    private static final List<String> EXPECTED = Arrays.asList("commit", "unknown-commit", "unknown-twice", "plain",
        "delay", "large", "batch-1", "batch-2", "oneway", "order-0", "order-1", "order-2", "order-3", "order-4");
    private static final Set<String> CONSUMED = ConcurrentHashMap.newKeySet();
    private static final Set<String> IN_ORDER = ConcurrentHashMap.newKeySet();
    private static final Set<String> ASKED = ConcurrentHashMap.newKeySet();
    private static final Map<String, Integer> FAILED = new ConcurrentHashMap<>();
    private static final char[] LARGE = new char[20_000];
    private static final String NAMESPACE = System.getProperty("namespace");

    private static String topic;
    private static RPCHook hook;
    private static boolean holds;

    public static void main(String[] arguments) {
        try {
            run(arguments);
        } catch (Exception error) {
            // The client's threads would keep the process alive.
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static void run(String[] arguments) throws Exception {
        Arrays.fill(LARGE, 'x');
        String address = arguments[1];
        topic = arguments[2];
        if (!arguments[5].isEmpty()) {
            hook = new AclClientRPCHook(new SessionCredentials(arguments[5], arguments[6]));
        }
        switch (arguments[0]) {
            case "scenario":
                scenario(address, arguments[3], arguments[4]);
                break;
            case "orphan":
                TransactionMQProducer dying = producer(address, arguments[3]);
                transaction(dying, "unknown-commit");
                Runtime.getRuntime().halt(0);
                break;
            case "answer":
                TransactionMQProducer back = producer(address, arguments[3]);
                // The client of 5.x looks for a broker, and says that it is there, only when it sends.
                sent("back", routed(() -> back.send(message("back"))));
                long end = System.currentTimeMillis() + 90_000;
                while (ASKED.isEmpty() && System.currentTimeMillis() < end) {
                    Thread.sleep(50);
                }
                // The end is sent by another thread after the listener has returned.
                Thread.sleep(1000);
                break;
            case "hold":
                holds = true;
                transaction(producer(address, arguments[3]), "unknown-commit");
                Thread.sleep(600_000);
                break;
            case "send":
                TransactionMQProducer sender = producer(address, arguments[3]);
                for (int number = 7; number < arguments.length; number++) {
                    String body = arguments[number];
                    Message one = message(body);
                    // Only a message without a chosen queue is sent again by another broker.
                    if (!body.contains(":")) {
                        sent(body, routed(() -> sender.send(one)));
                        continue;
                    }
                    String key = body.split(":")[0];
                    one.setKeys(key);
                    sent(body, routed(() -> sender.send(one, (queues, message, of) ->
                        queues.get(Math.floorMod(of.hashCode(), queues.size())), key)));
                }
                break;
            case "order":
                orderly(address, arguments[4], -1);
                say("started", new HashMap<>());
                Thread.sleep(600_000);
                break;
            case "consume":
                concurrent(address, arguments[4], -1);
                say("started", new HashMap<>());
                Thread.sleep(600_000);
                break;
            default:
                throw new IllegalArgumentException(arguments[0]);
        }
        say("done", new HashMap<>());
        Runtime.getRuntime().halt(0);
    }

    private static void scenario(String address, String producerGroup, String consumerGroup) throws Exception {
        DefaultMQPushConsumer all = concurrent(address, consumerGroup, 1);
        DefaultMQPushConsumer ordered = orderly(address, consumerGroup + "-orderly", 1);
        TransactionMQProducer producer = producer(address, producerGroup);
        say("started", new HashMap<>());
        for (String body : Arrays.asList("commit", "rollback", "unknown-commit", "unknown-rollback", "unknown-twice")) {
            transaction(producer, body);
        }
        Message plain = message("plain");
        plain.setTags("created");
        plain.setKeys(Arrays.asList("k1", "k2"));
        plain.putUserProperty("shop", "s1");
        sent("plain", producer.send(plain));
        Message delay = message("delay");
        delay.setDelayTimeLevel(2);
        sent("delay", producer.send(delay));
        sent("large", producer.send(new Message(topic, new String(LARGE).getBytes(StandardCharsets.UTF_8))));
        sent("poison", producer.send(message("poison")));
        producer.send(new ArrayList<>(Arrays.asList(message("batch-1"), message("batch-2"))));
        for (int number = 0; number < 5; number++) {
            Message one = message("order-" + number);
            one.setKeys("order-1030");
            sent("order-" + number, producer.send(one, (queues, message, key) ->
                queues.get(Math.floorMod(key.hashCode(), queues.size())), "order-1030"));
        }
        producer.sendOneway(message("oneway"));
        long end = System.currentTimeMillis() + 100_000;
        while (System.currentTimeMillis() < end
            && !(CONSUMED.containsAll(EXPECTED) && IN_ORDER.containsAll(EXPECTED) && FAILED.getOrDefault("poison", 0) > 1
                && FAILED.getOrDefault("poison in order", 0) > 1)) {
            Thread.sleep(100);
        }
        // A message is sent back after its listener has returned.
        Thread.sleep(2000);
        all.shutdown();
        ordered.shutdown();
        producer.shutdown();
    }

    private static TransactionMQProducer producer(String address, String group) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group, hook);
        producer.setNamesrvAddr(address);
        if (NAMESPACE != null) {
            producer.setNamespace(NAMESPACE);
        }
        // On a busy machine a first request takes longer than the client's 3 s.
        producer.setMqClientApiTimeout(30_000);
        producer.setSendMsgTimeout(30_000);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                String body = bodyOf(message);
                return body.equals("commit") ? LocalTransactionState.COMMIT_MESSAGE
                    : body.equals("rollback") ? LocalTransactionState.ROLLBACK_MESSAGE : LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String body = bodyOf(message);
                boolean first = ASKED.add(body);
                Map<String, Object> fields = described(message);
                fields.put("transaction_id", message.getTransactionId());
                say("checked", fields);
                if (holds) {
                    new Scanner(System.in).nextLine();
                }
                if (body.equals("unknown-twice") && first) {
                    return LocalTransactionState.UNKNOW;
                }
                return body.endsWith("rollback") ? LocalTransactionState.ROLLBACK_MESSAGE
                    : LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        return producer;
    }

    private static DefaultMQPushConsumer concurrent(String address, String group, int most) throws Exception {
        DefaultMQPushConsumer consumer = consumer(address, group);
        consumer.setMaxReconsumeTimes(most);
        consumer.registerMessageListener(new MessageListenerConcurrently() {
            @Override
            public ConsumeConcurrentlyStatus consumeMessage(List<MessageExt> messages, ConsumeConcurrentlyContext context) {
                boolean later = false;
                for (MessageExt message : messages) {
                    say("consumed", described(message));
                    String body = bodyOf(message);
                    later |= body.equals("poison") || (body.equals("plain") && message.getReconsumeTimes() == 0);
                    if (body.equals("poison")) {
                        FAILED.merge(body, 1, Integer::sum);
                    }
                    if (!later) {
                        CONSUMED.add(body);
                    }
                }
                return later ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
        });
        consumer.start();
        return consumer;
    }

    private static DefaultMQPushConsumer orderly(String address, String group, int most) throws Exception {
        DefaultMQPushConsumer consumer = consumer(address, group);
        consumer.setMaxReconsumeTimes(most);
        consumer.registerMessageListener(new MessageListenerOrderly() {
            @Override
            public ConsumeOrderlyStatus consumeMessage(List<MessageExt> messages, ConsumeOrderlyContext context) {
                for (MessageExt message : messages) {
                    String body = bodyOf(message);
                    Map<String, Object> fields = described(message);
                    // The same clock for all processes of the machine.
                    fields.put("at", System.nanoTime());
                    say("ordered", fields);
                    boolean poison = body.equals("poison") && FAILED.merge("poison in order", 1, Integer::sum) > 0;
                    if (poison || (body.equals("order-2") && FAILED.merge(body, 1, Integer::sum) == 1)) {
                        context.setSuspendCurrentQueueTimeMillis(200);
                        return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                    }
                    IN_ORDER.add(body);
                }
                return ConsumeOrderlyStatus.SUCCESS;
            }
        });
        consumer.start();
        return consumer;
    }

    private static DefaultMQPushConsumer consumer(String address, String group) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, hook, new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(address);
        if (NAMESPACE != null) {
            consumer.setNamespace(NAMESPACE);
        }
        consumer.setMqClientApiTimeout(30_000);
        consumer.setHeartbeatBrokerInterval(Integer.getInteger("heartbeat", consumer.getHeartbeatBrokerInterval()));
        consumer.subscribe(topic, "*");
        return consumer;
    }

    private static Message message(String body) {
        return new Message(topic, body.getBytes(StandardCharsets.UTF_8));
    }

    private static void transaction(TransactionMQProducer producer, String body) throws Exception {
        Message message = message(body);
        message.setTags("created");
        message.putUserProperty("shop", "s1");
        TransactionSendResult result = routed(() -> producer.sendMessageInTransaction(message, null));
        Map<String, Object> fields = new HashMap<>();
        fields.put("body", body);
        fields.put("message_id", result.getMsgId());
        fields.put("transaction_id", result.getTransactionId());
        fields.put("status", result.getSendStatus().name());
        say("sent", fields);
    }

    /** Send, again while the client knows no route: it waits at most 3 s for another thread that asks for it. */
    private static <T> T routed(Callable<T> sending) throws Exception {
        long end = System.currentTimeMillis() + 60_000;
        while (true) {
            try {
                return sending.call();
            } catch (MQClientException error) {
                if (!String.valueOf(error.getMessage()).contains("No route info") || System.currentTimeMillis() > end) {
                    throw error;
                }
                Thread.sleep(200);
            }
        }
    }

    private static void sent(String body, SendResult result) {
        Map<String, Object> fields = new HashMap<>();
        fields.put("body", body);
        fields.put("message_id", result.getMsgId());
        fields.put("status", result.getSendStatus().name());
        say("sent", fields);
    }

    private static String bodyOf(Message message) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        return body.equals(new String(LARGE)) ? "large" : body;
    }

    private static Map<String, Object> described(MessageExt message) {
        Map<String, Object> fields = new HashMap<>();
        fields.put("body", bodyOf(message));
        fields.put("message_id", message.getMsgId());
        fields.put("topic", message.getTopic());
        fields.put("tag", message.getTags());
        fields.put("keys", message.getKeys());
        fields.put("shop", message.getProperty("shop"));
        fields.put("attempt", message.getReconsumeTimes() + 1);
        fields.put("transaction_id", message.getTransactionId());
        return fields;
    }

    private static synchronized void say(String what, Map<String, Object> fields) {
        StringBuilder text = new StringBuilder("{\"what\":\"" + what + "\"");
        fields.forEach((name, value) -> text.append(",\"").append(name).append("\":").append(
            value == null || value instanceof Number ? String.valueOf(value)
                : "\"" + value.toString().replace("\\", "\\\\").replace("\"", "\\\"") + "\""));
        System.out.println(text.append("}"));
        System.out.flush();
    }
}
