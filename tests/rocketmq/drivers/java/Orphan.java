import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.Map;
import java.util.Scanner;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Apache's client for Java with one transaction whose end is never said.
 *
 * <p>Arguments: endpoints, topic, consumer group. Its checker prints that it was asked, and answers when it reads a line.
 * A push consumer prints what it gets. It runs until it is killed.
 */
public class Orphan {
    private static final Scanner ANSWERS = new Scanner(System.in);

    public static void main(String[] arguments) throws Exception {
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        ClientConfiguration configuration =
            ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        Map<String, FilterExpression> all = Collections.singletonMap(arguments[1], FilterExpression.SUB_ALL);
        provider.newPushConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(arguments[2])
            .setSubscriptionExpressions(all).setMessageListener(message -> {
                say("pushed");
                return ConsumeResult.SUCCESS;
            }).build();
        Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration)
            .setTopics(arguments[1]).setTransactionChecker(message -> {
                say("checked");
                ANSWERS.nextLine();
                return TransactionResolution.COMMIT;
            }).build();
        Message message = provider.newMessageBuilder().setTopic(arguments[1])
            .setBody("order 1030".getBytes(StandardCharsets.UTF_8)).build();
        producer.send(message, producer.beginTransaction());
        say("sent");
        Thread.sleep(600_000);
    }

    private static synchronized void say(String what) {
        System.out.println("{\"what\":\"" + what + "\"}");
        System.out.flush();
    }
}
