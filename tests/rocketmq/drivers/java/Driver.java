import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Apache's client for Java: producer, transactions with a checker, a simple consumer, and two push consumers.
 *
 * <p>Arguments: endpoint, topic, consumer group, access key, secret, the seconds for which it stays, and a namespace if
 * there is one. The group `…-fifo` is ordered. It prints what happens as lines of JSON, and ends that many seconds after
 * the consumers have everything that is to come.
 */
public class Driver {
    private static final List<String> IN_ORDER = List.of("fifo-0", "fifo-1", "fifo-2");
    private static final List<String> DONE =
        List.of("commit", "orphan-commit", "orphan-unknown", "plain", "delay", "fifo-0", "fifo-1", "fifo-2");
    private static final int POISON_ATTEMPTS = 2;
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final Set<String> PUSHED = ConcurrentHashMap.newKeySet();
    private static final Set<String> ORDERED = ConcurrentHashMap.newKeySet();
    private static final Set<String> ASKED = ConcurrentHashMap.newKeySet();
    private static final AtomicInteger PUSH_FAILED = new AtomicInteger();
    private static final AtomicInteger ORDER_FAILED = new AtomicInteger();

    private static String topic;
    private static Producer producer;

    public static void main(String[] arguments) throws Exception {
        topic = arguments[1];
        String group = arguments[2];
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false);
        if (!arguments[3].isEmpty()) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(arguments[3], arguments[4]));
        }
        if (arguments.length > 6) {
            builder.setNamespace(arguments[6]);
        }
        ClientConfiguration configuration = builder.build();
        Map<String, FilterExpression> all = Collections.singletonMap(topic, FilterExpression.SUB_ALL);
        SimpleConsumer simple = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(group).setAwaitDuration(Duration.ofSeconds(5)).setSubscriptionExpressions(all).build();
        PushConsumer push = PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(group + "-push").setSubscriptionExpressions(all).setMessageListener(Driver::consume).build();
        PushConsumer fifo = PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(group + "-fifo").setSubscriptionExpressions(all).setMessageListener(Driver::inOrder).build();
        producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic)
            .setTransactionChecker(Driver::check).build();
        say("started", Map.of());

        transaction("commit").commit();
        transaction("rollback").rollback();
        for (String orphan : List.of("orphan-commit", "orphan-rollback", "orphan-unknown")) {
            transaction(orphan);
        }
        send(message("plain").setTag("created").setKeys("k1", "k2").addProperty("shop", "s1").build());
        for (String body : IN_ORDER) {
            send(message(body).setMessageGroup("g1").build());
        }
        send(message("poison").setMessageGroup("g2").build());
        send(message("delay").setDeliveryTimestamp(System.currentTimeMillis() + 2000).build());

        Set<String> seen = new HashSet<>();
        long end = System.currentTimeMillis() + 90_000;
        while (System.currentTimeMillis() < end && !hasAll(seen)) {
            for (MessageView one : simple.receive(16, Duration.ofSeconds(30))) {
                Map<String, Object> fields = new HashMap<>(described(one));
                fields.put("keys", new TreeSet<>(one.getKeys()));
                fields.put("attempt", one.getDeliveryAttempt());
                fields.put("tag", one.getTag());
                fields.put("group", one.getMessageGroup());
                say("received", fields);
                simple.ack(one);
                seen.add(bodyOf(one));
            }
        }
        Thread.sleep(1000 * Integer.parseInt(arguments[5]));
        say("done", Map.of());
        Runtime.getRuntime().halt(0);
    }

    private static boolean hasAll(Set<String> seen) {
        return seen.containsAll(DONE) && seen.contains("poison") && PUSHED.containsAll(DONE)
            && ORDERED.containsAll(IN_ORDER) && Math.min(PUSH_FAILED.get(), ORDER_FAILED.get()) >= POISON_ATTEMPTS;
    }

    private static MessageBuilder message(String body) {
        return PROVIDER.newMessageBuilder().setTopic(topic).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    private static Transaction transaction(String body) throws Exception {
        Transaction begun = producer.beginTransaction();
        Message made = message(body).setTag("created").addProperty("shop", "s1").build();
        say("sent", Map.of("body", body, "message_id", producer.send(made, begun).getMessageId().toString()));
        return begun;
    }

    private static void send(Message message) throws Exception {
        String body = StandardCharsets.UTF_8.decode(message.getBody()).toString();
        say("sent", Map.of("body", body, "message_id", producer.send(message).getMessageId().toString()));
    }

    private static TransactionResolution check(MessageView message) {
        say("checked", described(message));
        String body = bodyOf(message);
        if (body.equals("orphan-unknown") && ASKED.add(body)) {
            return TransactionResolution.UNKNOWN;
        }
        return body.endsWith("rollback") ? TransactionResolution.ROLLBACK : TransactionResolution.COMMIT;
    }

    private static ConsumeResult consume(MessageView message) {
        String body = bodyOf(message);
        say("pushed", Map.of("body", body, "attempt", message.getDeliveryAttempt()));
        if (body.equals("poison")) {
            PUSH_FAILED.incrementAndGet();
            return ConsumeResult.FAILURE;
        }
        if (body.equals("plain") && message.getDeliveryAttempt() == 1) {
            return ConsumeResult.FAILURE;
        }
        PUSHED.add(body);
        return ConsumeResult.SUCCESS;
    }

    private static ConsumeResult inOrder(MessageView message) {
        String body = bodyOf(message);
        say("ordered", Map.of("body", body));
        if (body.equals("poison")) {
            ORDER_FAILED.incrementAndGet();
            return ConsumeResult.FAILURE;
        }
        if (body.equals("fifo-1") && ASKED.add(body)) {
            return ConsumeResult.FAILURE;
        }
        ORDERED.add(body);
        return ConsumeResult.SUCCESS;
    }

    private static String bodyOf(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }

    private static Map<String, Object> described(MessageView message) {
        return Map.of("body", bodyOf(message), "message_id", message.getMessageId().toString(), "properties",
            message.getProperties());
    }

    private static synchronized void say(String what, Map<String, ?> fields) {
        Map<String, Object> all = new HashMap<>(fields);
        all.put("what", what);
        System.out.println(json(all));
        System.out.flush();
    }

    private static String json(Object value) {
        if (value instanceof Optional) {
            return json(((Optional<?>) value).orElse(null));
        }
        if (value instanceof Map) {
            StringBuilder text = new StringBuilder();
            ((Map<?, ?>) value).forEach((name, one) ->
                text.append(text.length() == 0 ? "" : ",").append(json(name.toString())).append(":").append(json(one)));
            return "{" + text + "}";
        }
        if (value instanceof Iterable) {
            StringBuilder text = new StringBuilder();
            ((Iterable<?>) value).forEach(one -> text.append(text.length() == 0 ? "" : ",").append(json(one)));
            return "[" + text + "]";
        }
        return value instanceof String ? "\"" + ((String) value).replace("\"", "\\\"") + "\"" : String.valueOf(value);
    }
}
